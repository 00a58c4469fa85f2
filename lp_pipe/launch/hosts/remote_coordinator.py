"""The coordinator as an agent sees it: messages of its nodes go on to the launcher."""

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from lp_pipe.launch.hosts.agent_messages import CallsOfNodes, FindAll, NodeNotice, NodeQuestion
from lp_pipe.launch.supervision.messages import CallsTaken, CodeEnded, EndsUnasked, Find, Notice, Question
from lp_pipe.launch.supervision.peer import Peer

R = TypeVar("R")


class RemoteCoordinator:
    """A NodeApi for the processes of one host.

    It keeps what the host must know at once: which of its nodes run, and which were told to end. Reports of calls and
    questions for endpoints, which hundreds of nodes have at the same time, go together, as one message.
    """

    def __init__(self, launcher: Peer, node_ids: Iterable[str]) -> None:
        self._launcher = launcher
        self._lock = threading.Lock()
        self._running = set(node_ids)
        self._ending: set[str] = set()
        self._to_find: list[tuple[str, Future[str]]] = []
        self._is_finding = False
        self._calls: dict[str, int] = {}  # by node_id, what the node has reported since the last message

    def told_to_end(self, node_ids: Iterable[str]) -> None:
        """Note that the launcher stops these nodes: their ends are no failures."""
        with self._lock:
            self._ending.update(node_ids)

    def starts_again(self, node_id: str) -> None:
        """Note that the launcher wants a new process for a node, whatever became of the last one."""
        with self._lock:
            self._running.add(node_id)
            self._ending.discard(node_id)

    def is_running(self, node_id: str) -> bool:
        with self._lock:
            return node_id in self._running

    def must_end(self, node_id: str) -> bool:
        with self._lock:
            return node_id in self._ending

    def tell(self, node_id: str, notice: Notice) -> None:
        if isinstance(notice, CallsTaken):
            with self._lock:
                self._calls[node_id] = notice.calls
            return
        with self._lock:
            if isinstance(notice, CodeEnded):
                self._running.discard(node_id)
            elif isinstance(notice, EndsUnasked):
                self._ending.discard(node_id)
        self._launcher.tell_if_open(NodeNotice(node_id, notice))

    def ask(self, node_id: str, question: Question[R]) -> "Future[R]":
        if isinstance(question, Find):
            return cast("Future[R]", self.find(question.address))
        return self._launcher.ask(NodeQuestion(node_id, question))

    def report_calls(self) -> bool:
        """Send what `CallsTaken` messages said since the last report; return whether there was anything."""
        with self._lock:
            calls, self._calls = self._calls, {}
        if calls:
            self._launcher.tell_if_open(CallsOfNodes(calls))
        return bool(calls)

    def find(self, address: str) -> "Future[str]":
        """Ask for an endpoint; questions that come while one is on its way go together, as the next one."""
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
            answer = self._launcher.ask(FindAll([address for address, _ in asked]))
            answer.add_done_callback(lambda done: self._found([future for _, future in asked], done))

    def _found(self, futures: "list[Future[str]]", done: "Future[list[Any]]") -> None:
        error = done.exception()
        outcomes = [error] * len(futures) if error is not None else done.result()
        for future, outcome in zip(futures, outcomes, strict=True):
            if isinstance(outcome, str):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)
        self._find_next()
