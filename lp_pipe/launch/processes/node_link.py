"""The launcher's (or agent's) end of the connection that each node's process keeps to it."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from lp_pipe.connections import Connection
from lp_pipe.launch.supervision import messages
from lp_pipe.launch.supervision.messages import Notice, Question, View
from lp_pipe.launch.supervision.node_api import NodeApi
from lp_pipe.launch.supervision.peer import Peer
from lp_pipe.protos import supervision_pb2 as wire

_MENTION_BYTES = 256  # more than a short notice takes

OnHello = Callable[["NodeLink", messages.Hello], None]


class NodeLink(Peer):
    """Passes a node's messages to the coordinator, and asks its process for what the launcher wants to know.

    on_hello(stream, hello): called with the first message, which says which node the process is.
    has_loaded: the process has loaded the node, whose own code may have run.
    last_hits: of each fault of a test, how often it had struck when the process ended.
    """

    def __init__(self, connection: Connection, coordinator: NodeApi, on_hello: OnHello) -> None:
        super().__init__(connection, self._take)
        self.closed = threading.Event()
        self.has_loaded = False
        self.last_hits: dict[str, int] = {}
        self._coordinator = coordinator
        self._say_hello = on_hello
        self._node_id = ""
        self._view = View([], [], [])
        self._answered_at = time.monotonic()

    def on_close(self, reason: str) -> None:
        self.closed.set()
        super().on_close(reason)

    def mention(self, notice: Notice) -> None:
        """Send a short notice that is repeated, unless the process has not read the last ones.

        A process that is frozen must hold up neither the messages to all the others, nor the stop.
        """
        if self.connection.has_room_for(_MENTION_BYTES):
            self.tell_if_open(notice)

    def ask_stacks(self) -> "Future[str] | None":
        """Ask for the stacks of the process's threads, which may never come; None if it has ended."""
        return None if self.closed.is_set() else self.ask(messages.Stacks())

    def look(self, old_s: float) -> View:
        """Return what the process does, as it reported last, and ask it to report again."""
        self.mention(messages.Look(old_s))
        return self._view._replace(silence_s=time.monotonic() - self._answered_at)

    def ask_fault(self, fault: wire.Fault) -> "Future[int]":
        """Pass a fault to the process; done with how often it has struck there, also if the process ends."""
        hits: Future[int] = Future()

        def settle(done: "Future[int]") -> None:
            has_ended = done.exception() is not None
            hits.set_result(self.last_hits.get(fault.rule, 0) if has_ended else done.result())

        self.ask(messages.InjectFault(fault.SerializeToString())).add_done_callback(settle)
        return hits

    def _take(self, message: Any) -> object:
        if isinstance(message, messages.Hello):
            self._node_id = message.node_id
            self._view = View([], [], [], self._node_id)  # the process may never report
            self._say_hello(self, message)
        elif not self._node_id:
            raise RuntimeError(f"a node's process begins with Hello, not with {type(message).__name__}")
        elif isinstance(message, messages.Waits):
            activities = [one._replace(node=self._node_id) for one in message.view.activities]
            self._view = message.view._replace(activities=activities, node=self._node_id)
            self._answered_at = time.monotonic()
        elif isinstance(message, messages.Loaded):
            self.has_loaded = True
        elif isinstance(message, messages.LastHits):
            self.last_hits[message.rule] = message.hits
        elif isinstance(message, Question):
            return self._coordinator.ask(self._node_id, message)
        else:
            self._coordinator.tell(self._node_id, message)
        return None
