"""Who reads a client's connection: the thread that waits for a reply, which saves a hop between threads."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from lp_pipe.connections import PulledConnection, ends
from lp_pipe.rpc.calls import SyncCall


class Reading:
    """Of the threads that wait for replies one reads, for all; when it has its own, another goes on.

    A thread of its own reads only while something is unattended: futures, coroutines, streams. Nobody reads an idle
    connection.

    is_unattended: whether such a reply, or item, may come.
    blocked: the calls whose threads wait.
    """

    def __init__(
        self, connection: PulledConnection, is_unattended: Callable[[], bool], blocked: Mapping[int, SyncCall]
    ) -> None:
        self._connection = connection
        self._is_unattended = is_unattended
        self._blocked = blocked
        self._is_needed = threading.Lock()  # held while the thread has nothing to do
        self._is_needed.acquire()
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.Lock()
        self._thread_reads = False
        self._has_peer_closed = False
        self._descriptor = connection.fileno()

    def begin(self) -> None:
        """Notice the peer's end from now on, also while nobody reads."""
        ends.shared.watch(self._descriptor, self._on_peer_closed)

    def look(self) -> None:
        """Read what is there, without waiting, if nobody is reading."""
        if self._connection.try_reading():
            try:
                if self._connection.wait(0):
                    self._connection.read()
            finally:
                self._connection.done_reading()

    def wait_for(self, call: SyncCall, deadline: float | None) -> None:
        """Until the reply is there, or the deadline has passed; `pass_on` must follow."""
        while not call.has_reply:
            if self._connection.try_reading():
                try:
                    return self._read_for(call, deadline)
                finally:
                    self._connection.done_reading()
            if not call.wait(deadline):
                return None

    def pass_on(self) -> None:
        """Let somebody read, if replies are still to come; whoever is reading is left alone."""
        if self._has_peer_closed:
            self.look()
        elif self._is_unattended():
            if not self._thread_reads:
                self._wake_thread()
        elif self._blocked:
            for call in list(self._blocked.values())[:1]:
                call.wake()

    def end(self) -> None:
        """The connection has ended."""
        ends.shared.forget(self._descriptor)
        self._release()

    def _on_peer_closed(self) -> None:
        self._has_peer_closed = True  # if somebody reads, who may be about to leave
        self.look()

    def _read_for(self, call: SyncCall, deadline: float | None) -> None:
        while not call.has_reply:
            if not self._connection.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return
            self._connection.read()

    def _wake_thread(self) -> None:
        with self._thread_lock:
            if self._thread is None:
                name = f"read {self._connection.peer}"
                self._thread = threading.Thread(target=self._read_unattended, name=name, daemon=True)
                self._thread.start()
        self._release()

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # it knows already
            self._is_needed.release()

    def _read_unattended(self) -> None:
        while self._connection.closed_reason is None:
            self._is_needed.acquire()
            if not self._connection.try_reading():
                continue  # the one who reads passes on
            self._thread_reads = True
            try:
                while self._is_unattended():
                    self._connection.read_next()
            finally:
                self._thread_reads = False
                self._connection.done_reading()
            self.pass_on()
