"""A condition variable: the thread that waits reads the channel's connection itself.

That saves a hop between threads for every message.
"""

import os
import resource
import threading
import time
from collections.abc import Callable

from lp_pipe.channels.background_reader import WatchedConnection
from lp_pipe.channels.shm_queue import Doorbell
from lp_pipe.connections import Connection, PulledConnection
from lp_pipe.connections.kernel_calls import usable_cores

# How long a waiting thread spins before it sleeps. A thread that sleeps must be woken, and finds its core cold. On a
# virtual machine, whose host gives idle cores away, a stage that sleeps shortly before each action computes a tenth
# longer.
_SPIN_S = 2e-2
_MAX_SKIPPED = 192
_PEER_PATIENCE_S = 1.0
_SOON_S = 0.05  # the rest of a frame usually comes within this time
_PREEMPTED_S = 5e-5  # another thread that had the core for so long needs it more
_LONG_PREEMPTED_S = 5e-4  # and one that had it for so long will need it again
_RUSAGE_WHO = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


class ReadingCondition:
    """Waits like a condition for what arrives on a connection. `state` is the condition of the channel's end.

    Some connections deliver frames by a thread of their own (in one process, over gRPC), or are read by another thread.
    These are only waited for.

    doorbell: of this end, if there is a shared-memory queue. watched: set while the background reader may read.
    """

    def __init__(self, state: threading.Condition) -> None:
        self._state = state
        self._connection: PulledConnection | None = None
        self.doorbell: Doorbell | None = None
        self.watched: WatchedConnection | None = None
        self._spinner = _Spinner()

    def attach(self, connection: Connection) -> None:
        """Read this connection from now on, if it can be read."""
        if isinstance(connection, PulledConnection):
            self._connection = connection

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `is_so()`; return False if that takes longer than `timeout_s`.

        Called, and returns, with the state's lock held.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            seen = self.doorbell.count() if self.doorbell is not None else 0  # before `is_so` reads the queue
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
                    self._state.notify_all()  # another waiting thread may read now
            else:
                self._state.wait(remaining)

    def _has_come(self, is_so: Callable[[], bool]) -> bool:
        """Return whether it is so, after reading what is there: a wait of no time has read nothing yet."""
        self._state.release()
        try:
            self.poll()
        finally:
            self._state.acquire()
        return is_so()

    def poll(self) -> None:
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
                self._state.notify_all()  # threads that began to wait meanwhile could not read

    def wait_for_reason(self, reason: Callable[[], str | None]) -> str | None:
        """Return why the channel is closed; None if that is not known within a second.

        The thread that reads learns the reason soon after a transfer has failed.
        """
        with self._state:
            self._state.wait_for(lambda: reason() is not None, _PEER_PATIENCE_S)
            return reason()

    def wake(self) -> None:
        """Wake all waiting threads; called with the lock held."""
        self._state.notify_all()
        if self._connection is not None:
            self._connection.interrupt()

    def _read(self, connection: PulledConnection, seen: int, deadline: float | None) -> None:
        doorbell = self.doorbell
        if self.watched is not None:
            self.watched.pause()
        try:
            if self._spinner.spin(connection, doorbell, seen, deadline) or (
                doorbell is not None and not doorbell.arm(seen)
            ):
                return  # the queue has something
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
        """Stop reading, as the one thread that reads."""
        if self.watched is not None:
            self.watched.leave()
        else:
            connection.done_reading()


class _Spinner:
    """Spins for a while before its thread sleeps, to see whether something arrives.

    If that is in vain (the peer computes for longer), it spins ever more rarely. Another thread that could run on this
    core gets it.
    """

    def __init__(self) -> None:
        self._is_possible = len(usable_cores()) > 1
        self._misses = 0
        self._skipped = 0

    def spin(self, connection: PulledConnection, doorbell: Doorbell | None, seen: int, deadline: float | None) -> bool:
        """Spin before a `wait`.

        Return True if the wait is over because the doorbell's number is not `seen` any more.
        """
        if not self._is_possible or self._skipped < min(self._misses * self._misses, _MAX_SKIPPED):
            self._skipped += 1
            return False
        self._skipped = 0
        now = time.monotonic()
        end, switches = now + _SPIN_S, _switches()
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
            if now - before > _PREEMPTED_S and _switches() != switches:
                self._misses += now - before > _LONG_PREEMPTED_S
                return False
            os.sched_yield()


def _switches() -> int:
    """Return how often another thread has taken this thread's core; preemptions by a hypervisor do not count."""
    return resource.getrusage(_RUSAGE_WHO).ru_nivcsw


def _until(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
