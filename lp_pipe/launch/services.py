"""The NodeServices of a program in its coordinator's process: for nodes that are threads, and for the launcher."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

from lp_pipe.errors import Unavailable
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.host import Host
from lp_pipe.launch.supervision import messages
from lp_pipe.launch.supervision.messages import Notice, Question
from lp_pipe.launch.supervision.node_api import MessageServices
from lp_pipe.rpc.fork_guard import ForkGuard, no_endpoint

R = TypeVar("R")

_COORDINATOR, _IN_THAT_PROCESS = "the coordinator of the program", "ask it there"


class LocalServices(MessageServices):
    """NodeServices of a node that shares the coordinator's process.

    node_id: the name under which metrics are logged.
    """

    def __init__(self, coordinator: Coordinator, node_id: str) -> None:
        self._coordinator = coordinator
        self._node_id = node_id
        self._owner = ForkGuard()  # of the coordinator: nothing happens to a forked child's copy of it

    def endpoint_for(self, address: str) -> str:
        return self._coordinator.endpoint_for(address)

    def new_endpoint(self) -> str:
        return self._coordinator.new_endpoint()

    def resolve(self, address: str) -> "Future[str]":
        return super().resolve(address) if self._owner.is_here else no_endpoint()

    def watch_state(self, addresses: Sequence[str]) -> "Future[str]":
        return super().watch_state(addresses) if self._owner.is_here else Future()

    def reserve_port(self, address: str) -> str:
        self._owner.check(_COORDINATOR, _IN_THAT_PROCESS)
        return super().reserve_port(address)

    def request_stop(self) -> None:
        self._owner.check(_COORDINATOR, _IN_THAT_PROCESS)
        super().request_stop()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None) -> None:
        self._owner.check(_COORDINATOR, _IN_THAT_PROCESS)
        super().log_metrics(metrics, step)

    def _tell(self, notice: Notice) -> None:
        self._coordinator.tell(self._node_id, notice)

    def _ask(self, question: Question[R]) -> "Future[R]":
        return self._coordinator.ask(self._node_id, question)


_ONLY_OF_NODES = (
    *(messages.Register, messages.Withdraw, messages.HasLostState, messages.Meet, messages.WatchGeneration),
    *(messages.InnerNodesEnded, messages.StopInnerNodes),
)


def _check_is_of_launcher(message: Notice | Question[Any]) -> None:
    """
    Raises:
        RuntimeError: only a node may send such a message.
    """
    if isinstance(message, _ONLY_OF_NODES):
        raise RuntimeError(f"only a node of the program may ask for {type(message).__name__}, not its launcher")


class LauncherServices(LocalServices):
    """NodeServices for clients made in the launching process.

    deferring: keeps signals out of its body. One that is raised in the main thread as that takes the coordinator's
        lock, or gives it back, would leave it locked, and the stop needs it.
    """

    def __init__(
        self, coordinator: Coordinator, host: Host, deferring: Callable[[], AbstractContextManager[None]]
    ) -> None:
        super().__init__(coordinator, "launcher")
        self._host = host
        self._deferring = deferring

    def new_endpoint(self) -> NoReturn:
        raise RuntimeError("only a node can listen at an endpoint of the program")

    def first_failure(self) -> Exception | None:
        with self._deferring():
            return self._coordinator.settled_failure(self._host.dying())

    def _tell(self, notice: Notice) -> None:
        _check_is_of_launcher(notice)
        super()._tell(notice)

    def _ask(self, question: Question[R]) -> "Future[R]":
        _check_is_of_launcher(question)
        with self._deferring():
            return super()._ask(question)


class EndedServices(MessageServices):
    """NodeServices in the launching process once the program is over: says why each of its servers is gone."""

    def __init__(self, reasons: Mapping[str, str], failure: Exception | None) -> None:
        self._reasons = reasons
        self._failure = failure

    def first_failure(self) -> Exception | None:
        return self._failure

    def endpoint_for(self, address: str) -> str:
        raise Unavailable(self._reasons[address])

    def new_endpoint(self) -> NoReturn:
        raise RuntimeError("only a node can listen at an endpoint of the program")

    def _tell(self, notice: Notice) -> None:
        _check_is_of_launcher(notice)
        if not isinstance(notice, messages.RequestStop):  # the program has stopped
            raise RuntimeError("the program has ended")

    def _ask(self, question: Question[R]) -> "Future[R]":
        _check_is_of_launcher(question)
        answer: Future[R] = Future()  # of WatchState, it never comes: nothing is started again any more
        if isinstance(question, messages.Resolve | messages.ReservePort):
            answer.set_exception(Unavailable(self._reasons[question.address]))
        return answer
