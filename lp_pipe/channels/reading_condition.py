"""How a channel's end waits: it reads its connection itself, which saves a hop between threads for every message."""

import os
import resource
import threading
import time
from collections.abc import Callable

from lp_pipe.channels.background_reader import WatchedConnection
from lp_pipe.channels.shm_queue import Doorbell
from lp_pipe.connections import Connection, PulledConnection
from lp_pipe.connections.kernel_calls import usable_cores

# Whoever sleeps has to be woken, and finds its core cold: on a virtual machine, whose host gives an idle core away, a
# stage that slept a moment before each action takes a tenth longer to compute.
_LOOKING_S = 2e-2
_MOST_SKIPPED = 192
_PEER_PATIENCE_S = 1.0
_SOON_S = 0.05  # within which the rest of a frame comes, as a rule
_TAKEN_AWAY_S = 5e-5  # whoever had the core meanwhile needs it more
_FOR_LONG_S = 5e-4  # and will need it again
_WHOSE_SWITCHES = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


class ReadingCondition:
    """Like a condition's `wait_for`, for what arrives on a connection. `state` is the end's own condition.

    A connection that pushes (in one process, over gRPC), or that another thread reads, is only waited for.
    doorbell: of this end, where there is a queue. watched: set while another thread reads for this end.
    """

    def __init__(self, state: threading.Condition) -> None:
        self._state = state
        self._connection: PulledConnection | None = None
        self.doorbell: Doorbell | None = None
        self.watched: WatchedConnection | None = None
        self._spinner = _Spinner()

    def attach(self, connection: Connection) -> None:
        """From now on read this connection, if it can be read."""
        if isinstance(connection, PulledConnection):
            self._connection = connection

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until it is so, or `timeout_s` has passed (False); called, and returns, with the state's lock held."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            seen = self.doorbell.count() if self.doorbell is not None else 0  # before `is_so` looks at the queue
            if is_so():
                return True
            remaining = _until(deadline)
            if remaining == 0:
                return timeout_s == 0 and self._has_come(is_so)
            if self._connection is not None and self._connection.try_reading():
                self._state.release()
                try:
                    self._read(self._connection, seen, deadline)
                finally:
                    self._state.acquire()
                    self._state.notify_all()  # of those who wait another one may read
            else:
                self._state.wait(remaining)

    def _has_come(self, is_so: Callable[[], bool]) -> bool:
        """Without waiting; whoever gives no time at all has read nothing yet."""
        self._state.release()
        try:
            self.look()
        finally:
            self._state.acquire()
        return is_so()

    def look(self) -> None:
        """Read what is there, without waiting; called without the lock."""
        connection = self._connection
        if connection is None or not connection.try_reading():
            return
        try:
            if self.watched is not None:
                self.watched.pause()
            if connection.is_ready() and connection.wait(0):
                connection.read()
        finally:
            self._leave(connection)
            with self._state:
                self._state.notify_all()  # who came to wait meanwhile found the reading taken

    def wait_for_reason(self, reason: Callable[[], str | None]) -> str | None:
        """Why the channel is closed, which who reads knows a moment after a transfer has failed; None: nobody says."""
        with self._state:
            self._state.wait_for(lambda: reason() is not None, _PEER_PATIENCE_S)
            return reason()

    def wake(self) -> None:
        """Let everybody who waits look again; called with the lock held."""
        self._state.notify_all()
        if self._connection is not None:
            self._connection.interrupt()

    def _read(self, connection: PulledConnection, seen: int, deadline: float | None) -> None:
        doorbell = self.doorbell
        if self.watched is not None:
            self.watched.pause()
        try:
            if self._spinner.look(connection, doorbell, seen, deadline) or (
                doorbell is not None and not doorbell.arm(seen)
            ):
                return  # something is on the queue
            try:
                if connection.wait(_until(deadline)):
                    connection.read()
                    while connection.is_inside_frame and connection.closed_reason is None and connection.wait(_SOON_S):
                        connection.read()
            finally:
                if doorbell is not None:
                    doorbell.disarm()
        finally:
            self._leave(connection)

    def _leave(self, connection: PulledConnection) -> None:
        """The one thread that reads does so no more."""
        if self.watched is not None:
            self.watched.leave()
        else:
            connection.done_reading()


class _Spinner:
    """Looks for a while whether something arrives, before its thread sleeps.

    Where that is in vain (the peer computes for longer) it is done ever more rarely. Another thread that could run on
    this very core gets it.
    """

    def __init__(self) -> None:
        self._is_possible = len(usable_cores()) > 1
        self._misses = 0
        self._skipped = 0

    def look(self, connection: PulledConnection, doorbell: Doorbell | None, seen: int, deadline: float | None) -> bool:
        """Before a `wait`; True when the wait is over, because the doorbell's number is not `seen` any more."""
        if not self._is_possible or self._skipped < min(self._misses * self._misses, _MOST_SKIPPED):
            self._skipped += 1
            return False
        self._skipped = 0
        now = time.monotonic()
        end, switches = now + _LOOKING_S, _switches()
        if deadline is not None:
            end = min(end, deadline)
        while True:
            if doorbell is not None and doorbell.count() != seen:
                self._misses //= 2
                return True
            if connection.is_ready():  # lets other threads of this process run
                self._misses //= 2
                return False
            before, now = now, time.monotonic()
            if now >= end:
                self._misses += 1
                return False
            if now - before > _TAKEN_AWAY_S and _switches() != switches:
                self._misses += now - before > _FOR_LONG_S
                return False
            os.sched_yield()


def _switches() -> int:
    """How often another thread of this machine has got this one's core; what a hypervisor takes is not among them."""
    return resource.getrusage(_WHOSE_SWITCHES).ru_nivcsw


def _until(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
