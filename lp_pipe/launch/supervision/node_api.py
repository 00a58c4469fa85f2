"""The coordinator's interface for nodes and their hosts: it takes messages, which services for nodes send."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from lp_pipe.launch.supervision import messages
from lp_pipe.launch.supervision.messages import Notice, Question
from lp_pipe.membership import Membership
from lp_pipe.telemetry.metrics import as_numbers

R = TypeVar("R")


class NodeApi(Protocol):
    """The coordinator, for what runs nodes. Thread-safe; every method returns at once.

    In the launcher's process it is the coordinator itself, in an agent what passes the messages on. A new service for
    nodes is a message type and its entry in the coordinator's table.

    node_id: the node that the message is from, or about.
    """

    def tell(self, node_id: str, notice: Notice) -> None: ...

    def ask(self, node_id: str, question: Question[R]) -> "Future[R]": ...

    def is_running(self, node_id: str) -> bool:
        """Return whether the node's code has not ended."""

    def must_end(self, node_id: str) -> bool:
        """Return whether the node was told to end, alone or with the whole program."""


class MessageServices:
    """NodeServices (context.py) of which each request is a message; where it goes is up to the subclass."""

    def _tell(self, notice: Notice) -> None:
        raise NotImplementedError

    def _ask(self, question: Question[R]) -> "Future[R]":
        raise NotImplementedError

    def register(self, address: str, endpoint: str) -> None:
        self._tell(messages.Register(address, endpoint))

    def withdraw(self, address: str, is_failing: bool) -> None:
        self._tell(messages.Withdraw(address, is_failing))

    def resolve(self, address: str) -> "Future[str]":
        return self._ask(messages.Resolve(address))

    def watch_state(self, addresses: Sequence[str]) -> "Future[str]":
        return self._ask(messages.WatchState(tuple(addresses)))

    def has_lost_state(self, address: str) -> bool:
        return self._ask(messages.HasLostState(address)).result()

    def reserve_port(self, address: str) -> str:
        return self._ask(messages.ReservePort(address)).result()

    def first_failure(self) -> Exception | None:
        return None  # the launcher reports it

    def request_stop(self) -> None:
        self._tell(messages.RequestStop())

    def inner_nodes_ended(self, colocation: str) -> "Future[str]":
        return self._ask(messages.InnerNodesEnded(colocation))

    def stop_inner_nodes(self, colocation: str) -> None:
        self._tell(messages.StopInnerNodes(colocation))

    def meet(self, group: str, generation: int, endpoint: bytes) -> "Future[Membership]":
        return self._ask(messages.Meet(group, generation, endpoint))

    def generation_over(self, group: str, generation: int) -> "Future[str]":
        return self._ask(messages.WatchGeneration(group, generation))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None) -> None:
        values, step = as_numbers(metrics, step)
        self._tell(messages.LogMetrics(dict(values), step))

    def log_event(self, event: str, **facts: Any) -> None:
        self._tell(messages.LogEvent(event, facts))
