"""The choice of the thread that reads a client's connection: a waiting one, which saves a switch between threads."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable

from lp_pipe.connections import PulledConnection, io_thread, nesting
from lp_pipe.connections.resource_limits import describe_error
from lp_pipe.errors import Unavailable
from lp_pipe.private_python import release_if_held_here
from lp_pipe.rpc.calls import CallFuture, PendingCalls, SyncCall

_UNASKED_LIMIT_S = 0.001  # for futures that no thread asks for
_FOREGROUND_LIMIT_S = 0.005


class ReplyReader:
    """Lets one of the threads that wait for replies read for all; when it has its own reply, another goes on.

    A background thread reads while something is urgent for which no thread waits: coroutines, streams, callbacks, or
    futures that no thread has asked for within a millisecond. An idle connection is not read.
    """

    def __init__(self, connection: PulledConnection, pending: PendingCalls) -> None:
        self._connection = connection
        self._pending = pending
        self._is_needed = threading.Lock()  # held while the background thread has nothing to do
        self._is_needed.acquire()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        self._thread_reads = False
        self._future_waiters: dict[object, None] = {}  # threads that wait for a future while another thread reads
        self._is_asked_for = False
        self._foreground_reads = 0  # the number of times that a waiting thread read
        self._is_check_scheduled = False  # whether a check for futures that no thread asks for is scheduled
        self._has_peer_closed = False
        self._descriptor = connection.fileno()

    def begin(self) -> None:
        """Notice the peer's end from now on, also while no thread reads."""
        if self._connection.try_reading():  # otherwise it has ended already
            try:
                io_thread.shared.watch(self._descriptor, self._on_peer_closed)
            finally:
                self._connection.done_reading()
            self.pass_on()  # the end may have come meanwhile

    def read_available(self) -> bool:
        """Read what is there, without waiting, if no thread is reading; False when the peer has closed."""
        connection = self._connection
        if not self._pending and connection.try_reading():
            try:
                if connection.is_ready():
                    connection.read()
            finally:
                connection.done_reading()
            if self._pending:
                self._wake_next()
            return connection.closed_reason is None
        # The reading thread may not have come to the end yet: a call sent now would be lost, though a new server is up.
        return not self._connection.has_peer_closed()

    def wait_for(self, call: SyncCall, deadline: float | None) -> None:
        """Wait until the reply is there or the deadline has passed; `pass_on` must follow."""
        while not call.has_reply:
            if self._read_for(call, deadline):
                return
            if not call.wait(deadline):
                return

    def wait_for_future(self, future: CallFuture, deadline: float | None) -> None:
        """Wait until the future is settled or the deadline has passed; after 5 ms the background thread reads."""
        waiter = object()
        self._is_asked_for = True
        try:
            self._future_waiters[waiter] = None
            soon = time.monotonic() + _FOREGROUND_LIMIT_S
            if not self._read_for(future, soon if deadline is None else min(soon, deadline)) or not future.done():
                self.read_in_background()
                future.wait(deadline)  # unlike a thread that reads, it notices at once when the future is cancelled
        finally:
            self._future_waiters.pop(waiter, None)
            self.pass_on()

    def read_inside(self, is_enough: Callable[[], bool], deadline: float | None) -> bool:
        """Read until `is_enough`, or the deadline, in code that has interrupted the reads of this very thread.

        Returns False when it has not interrupted them, so that there are other ways to wait.

        Raises:
            Unavailable: nothing can be read before this code returns.
        """
        if self._connection.is_stuck_here():
            raise Unavailable(
                f"this code has interrupted its thread in the middle of a frame from or to {self._connection.peer}, "
                "so nothing can be read from that connection before it returns: ask again later, or make a new call"
            )
        if not self._connection.is_read_here():
            return False
        while not is_enough() and self._connection.closed_reason is None:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                break
            self._connection.read_inside(remaining)
        return True

    def recover(self) -> None:
        """Release the lock if an exception interrupted the calling thread while it held it."""
        release_if_held_here(self._lock)

    def pass_on(self) -> None:
        """Let another thread read if replies are still to come; a thread that is reading is left alone."""
        if self._has_peer_closed:
            self._check_for_end()
        self._wake_next()

    def _wake_next(self) -> None:
        pending = self._pending
        if pending.others or pending.inboxes or self._future_waiters:
            self.read_in_background()
        elif pending.blocked:
            for call in list(pending.blocked.values())[:1]:
                call.wake()
        elif pending.futures and not self._is_check_scheduled:
            self._schedule_check()

    def read_in_background(self) -> None:
        """Make the background thread read; without more threads in the system, end the connection and its calls."""
        if self._thread_reads:
            return
        try:
            self._start_thread()
        except RuntimeError as error:  # the replies would never be read
            self._connection.close(f"no thread for reading the replies: {describe_error(error)}")
        self._release()

    def _start_thread(self) -> None:
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                name = f"read {self._connection.peer}"
                thread = threading.Thread(target=self._run_background, name=name, daemon=True)
                thread.start()  # stored after the start
                self._thread = thread

    def end(self) -> None:
        """Stop watching a connection that has ended."""
        io_thread.shared.forget(self._descriptor)
        self._release()

    def _schedule_check(self) -> None:
        """Give the threads that started futures a moment to ask for them; after it, the background thread reads."""
        self._is_check_scheduled = True
        foreground_reads = self._foreground_reads
        try:
            io_thread.shared.at(
                time.monotonic() + _UNASKED_LIMIT_S, functools.partial(self._check_futures, foreground_reads)
            )
        except RuntimeError:  # the system has no more threads
            self._is_check_scheduled = False
            self.read_in_background()

    def _check_futures(self, foreground_reads: int) -> None:
        self._is_check_scheduled = False
        if self._pending.futures and self._connection.closed_reason is None:
            if foreground_reads == self._foreground_reads:
                self.read_in_background()
            else:
                self._schedule_check()

    def _on_peer_closed(self) -> None:
        self._has_peer_closed = True  # set for a reading thread that may be about to stop
        self._check_for_end()
        self._wake_next()

    def _check_for_end(self) -> None:
        if self._connection.try_reading():
            try:
                if self._connection.wait(0):
                    self._connection.read()
                # the event was for an earlier connection with this descriptor
                if self._connection.closed_reason is None:
                    self._has_peer_closed = False
                    io_thread.shared.watch_again(self._descriptor)
            finally:
                self._connection.done_reading()

    def _read_for(self, call: SyncCall | CallFuture, deadline: float | None) -> bool:
        """Read until the reply is there or the deadline has passed; False when another thread reads."""
        if not self._connection.try_reading():
            return False
        self._foreground_reads += 1
        try:
            while not call.has_reply:
                if not self._connection.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    break
                self._connection.read()
        finally:
            self._connection.done_reading()
        return True

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is released already
            self._is_needed.release()

    def _is_background_needed(self) -> bool:
        """Return whether the background thread must read on.

        It need not for futures that a thread has asked for just before, even if none waits at this moment.
        """
        if self._pending.is_urgent() or self._future_waiters:
            return True
        is_asked_for, self._is_asked_for = self._is_asked_for, False
        return bool(self._pending.futures) and not is_asked_for

    def _run_background(self) -> None:
        with nesting.in_background():
            while self._connection.closed_reason is None:
                self._is_needed.acquire()
                if self._connection.try_reading():  # otherwise the reading thread passes on
                    self._read_while_needed()

    def _read_while_needed(self) -> None:
        self._thread_reads = True
        try:
            while self._is_background_needed():
                self._connection.read_next()
        finally:
            self._thread_reads = False
            self._connection.done_reading()
        self.pass_on()
