"""The coordinator, as the agent of another host sees it: everything goes on to the launcher."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future

from lp_pipe.errors import Unavailable
from lp_pipe.launch.coordination.record import Failure
from lp_pipe.launch.hosts.agent_link import AgentLink

_PORT_PATIENCE_S = 10.0


class RemoteCoordinator:
    """A Supervisor.

    What its host must know at once, it keeps itself: which of its nodes run, and which were told to end.
    """

    def __init__(self, link: AgentLink, node_ids: Iterable[str]) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._running = set(node_ids)
        self._ending: set[str] = set()
        self._to_find: list[tuple[str, Future[str]]] = []
        self._is_finding = False
        self._calls: dict[str, int] = {}  # by node_id: of its servers, since the last report

    def told_to_end(self, node_ids: Iterable[str]) -> None:
        """The launcher stops these: their ends are no failures."""
        with self._lock:
            self._ending.update(node_ids)

    def starts_again(self, node_id: str) -> None:
        """The launcher wants a new process for a node, whatever became of the last one."""
        with self._lock:
            self._running.add(node_id)
            self._ending.discard(node_id)

    def node_started(self, node_id: str, pid: int) -> None:
        self._link.tell("node_started", node_id, pid)

    def node_calls(self, node_id: str, calls: int) -> None:
        """Kept until `report_calls`: one message for the host, and not one for each node."""
        with self._lock:
            self._calls[node_id] = calls

    def report_calls(self) -> bool:
        """Whether there was anything to say."""
        with self._lock:
            calls, self._calls = self._calls, {}
        if calls:
            self._link.tell("calls", calls)
        return bool(calls)

    def node_ended(self, node_id: str, failure: Failure | None, can_restart: bool = True) -> None:
        with self._lock:
            self._running.discard(node_id)
        self._link.tell("node_ended", node_id, failure, can_restart)

    def node_ends_unasked(self, node_id: str) -> None:
        with self._lock:
            self._ending.discard(node_id)
        self._link.tell("node_ends_unasked", node_id)

    def node_down(self, node_id: str) -> None:
        self._link.tell("node_down", node_id)

    def is_running(self, node_id: str) -> bool:
        with self._lock:
            return node_id in self._running

    def must_end(self, node_id: str) -> bool:
        with self._lock:
            return node_id in self._ending

    def register(self, address: str, endpoint: str) -> None:
        self._link.tell("register", address, endpoint)

    def withdraw(self, address: str, is_failing: bool) -> None:
        self._link.tell("withdraw", address, is_failing)

    def hear(self) -> "Future[str]":
        return self._link.ask("hear")

    def find(self, address: str) -> "Future[str]":
        """Questions that come while one is on its way go together, as the next one."""
        found: Future[str] = Future()
        with self._lock:
            self._to_find.append((address, found))
            if self._is_finding:
                return found
            self._is_finding = True
        self._find_next()
        return found

    def _find_next(self) -> None:
        with self._lock:
            asked, self._to_find = self._to_find, []
            self._is_finding = bool(asked)
        if asked:
            answer = self._link.ask("find_all", [address for address, _ in asked])
            answer.add_done_callback(lambda done: self._found([future for _, future in asked], done))

    def _found(self, futures: "list[Future[str]]", done: "Future[list[str | Exception]]") -> None:
        error = done.exception()
        outcomes = [error] * len(futures) if error is not None else done.result()
        for future, outcome in zip(futures, outcomes, strict=True):
            if isinstance(outcome, str):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)
        self._find_next()

    def resolve(self, address: str) -> "Future[str]":
        return self._link.ask("resolve", address)

    def watch_state(self, addresses: Sequence[str]) -> "Future[str]":
        return self._link.ask("watch_state", list(addresses))

    def has_lost_state(self, address: str) -> "Future[str]":
        return self._link.ask("has_lost_state", address)

    def reserve_port(self, address: str) -> str:
        """A round trip, in the thread of one node's stream."""
        try:
            port: str = self._link.ask("reserve_port", address).result(_PORT_PATIENCE_S)
        except (Unavailable, TimeoutError) as error:
            raise RuntimeError(f"no port can be reserved: {error}") from error
        return port

    def inner_nodes_ended(self, colocation: str) -> "Future[str]":
        return self._link.ask("inner_nodes_ended", colocation)

    def stop_inner_nodes(self, colocation: str) -> None:
        self._link.tell("stop_inner_nodes", colocation)

    def request_stop(self) -> None:
        self._link.tell("request_stop")

    def log_metrics(self, node_id: str, values: Mapping[str, float], step: int | None) -> None:
        self._link.tell("log_metrics", node_id, dict(values), step)

    def log_event(self, node_id: str, event: str, step: int) -> None:
        self._link.tell("log_event", node_id, event, step)
