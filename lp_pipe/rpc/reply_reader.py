"""Who reads a client's connection: the thread that waits for a reply, which saves a hop between threads."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable

from lp_pipe.connections import PulledConnection, hangup_watcher
from lp_pipe.connections.resource_limits import describe_error
from lp_pipe.errors import Unavailable
from lp_pipe.private_python import release_if_held_here
from lp_pipe.rpc import deadlines, nesting
from lp_pipe.rpc.calls import CallFuture, SyncCall
from lp_pipe.rpc.pending_calls import PendingCalls

_PATIENCE_S = 0.001  # for futures that nobody asks for
_SOON_S = 0.005


class ReplyReader:
    """Of the threads that wait for replies one reads, for all; when it has its own, another goes on.

    A thread of its own reads while something is urgent that nobody waits for: coroutines, streams, callbacks, or
    futures that are asked for by none for a millisecond. Nobody reads an idle connection.
    """

    def __init__(self, connection: PulledConnection, pending: PendingCalls) -> None:
        self._connection = connection
        self._pending = pending
        self._is_needed = threading.Lock()  # held while the thread has nothing to do
        self._is_needed.acquire()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        self._thread_reads = False
        self._parked: dict[object, None] = {}  # threads that wait for a future while another reads
        self._is_asked_for = False
        self._turns = 0  # of those who waited and read
        self._is_patient = False  # until the next look at futures that nobody asks for
        self._has_peer_closed = False
        self._descriptor = connection.fileno()

    def begin(self) -> None:
        """Notice the peer's end from now on, also while nobody reads."""
        if self._connection.try_reading():  # else it has ended already
            try:
                hangup_watcher.shared.watch(self._descriptor, self._on_peer_closed)
            finally:
                self._connection.done_reading()
            self.pass_on()  # the end may have come meanwhile

    def look(self) -> bool:
        """Read what is there, without waiting, if nobody is reading; False when the peer has closed."""
        if not self._pending and self._connection.read_alone(0):
            self._wake_next()
            return self._connection.closed_reason is None
        # Whoever reads may not have come to the end yet: a call sent now would be lost, though a new server is up.
        return not self._connection.has_peer_closed()

    def wait_for(self, call: SyncCall, deadline: float | None) -> None:
        """Until the reply is there, or the deadline has passed; `pass_on` must follow."""
        while not call.has_reply:
            if self._read_for(call, deadline):
                return
            if not call.wait(deadline):
                return

    def wait_for_future(self, future: CallFuture, deadline: float | None) -> None:
        """Until the future is settled, the deadline has passed, or the wait is so long that a hop does not matter."""
        waiter = object()
        self._is_asked_for = True
        try:
            self._parked[waiter] = None
            soon = time.monotonic() + _SOON_S
            if not self._read_for(future, soon if deadline is None else min(soon, deadline)) or not future.done():
                self.attend()
                future.wait(deadline)  # unlike a thread that reads, it sees at once when the future is cancelled
        finally:
            self._parked.pop(waiter, None)
            self.pass_on()

    def read_inside(self, is_enough: Callable[[], bool], deadline: float | None) -> bool:
        """Read until it is enough, or the deadline, where this code has interrupted the reads of this very thread.

        False when it has not, so that there are other ways to wait.

        Raises:
            Unavailable: nothing can be read before this code returns.
        """
        if self._connection.is_stuck_here():
            raise Unavailable(
                f"this code has interrupted its thread in the middle of a frame from or to {self._connection.peer}: "
                "nothing can be read from there before it returns. Ask again later, or make a new call"
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
        """Give back the lock, where an exception has interrupted the calling thread between two bytecodes."""
        release_if_held_here(self._lock)

    def pass_on(self) -> None:
        """Let somebody read, if replies are still to come; whoever is reading is left alone."""
        if self._has_peer_closed:
            self._look_for_end()
        self._wake_next()

    def _wake_next(self) -> None:
        pending = self._pending
        if pending.others or pending.inboxes or self._parked:
            self.attend()
        elif pending.blocked:
            for call in list(pending.blocked.values())[:1]:
                call.wake()
        elif pending.futures and not self._is_patient:
            self._be_patient()

    def attend(self) -> None:
        """Let the thread read; where the system has no more threads the connection ends, and the calls with it."""
        if self._thread_reads:
            return
        try:
            self._start_thread()
        except RuntimeError as error:  # nobody would read the replies, ever
            self._connection.close(f"no thread for reading the replies: {describe_error(error)}")
        self._release()

    def _start_thread(self) -> None:
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                name = f"read {self._connection.peer}"
                thread = threading.Thread(target=self._read_unattended, name=name, daemon=True)
                thread.start()  # before it counts
                self._thread = thread

    def end(self) -> None:
        """The connection has ended."""
        hangup_watcher.shared.forget(self._descriptor)
        self._release()

    def _be_patient(self) -> None:
        """Whoever started futures will ask for them soon, and read himself; if not, the thread does."""
        self._is_patient = True
        turns = self._turns
        try:
            deadlines.shared.add(time.monotonic() + _PATIENCE_S, functools.partial(self._lose_patience, turns))
        except RuntimeError:  # the system has no more threads
            self._is_patient = False
            self.attend()

    def _lose_patience(self, turns: int) -> None:
        self._is_patient = False
        if self._pending.futures and self._connection.closed_reason is None:
            if turns == self._turns:
                self.attend()
            else:
                self._be_patient()

    def _on_peer_closed(self) -> None:
        with nesting.in_background():
            self._has_peer_closed = True  # if somebody reads, who may be about to leave
            self._look_for_end()
            self._wake_next()

    def _look_for_end(self) -> None:
        if self._connection.try_reading():
            try:
                if self._connection.wait(0):
                    self._connection.read()
                if self._connection.closed_reason is None:  # it was meant for who had this descriptor before
                    self._has_peer_closed = False
                    hangup_watcher.shared.watch_again(self._descriptor)
            finally:
                self._connection.done_reading()

    def _read_for(self, call: SyncCall | CallFuture, deadline: float | None) -> bool:
        """Read until the reply is there or the deadline has passed; False when another thread reads."""
        if not self._connection.try_reading():
            return False
        self._turns += 1
        try:
            while not call.has_reply:
                if not self._connection.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    break
                self._connection.read()
        finally:
            self._connection.done_reading()
        return True

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # it knows already
            self._is_needed.release()

    def _is_unattended(self) -> bool:
        """Whether the thread must read on: not for futures whose owner asks for them, and does not wait just now."""
        if self._pending.is_urgent() or self._parked:
            return True
        is_asked_for, self._is_asked_for = self._is_asked_for, False
        return bool(self._pending.futures) and not is_asked_for

    def _read_unattended(self) -> None:
        with nesting.in_background():
            while self._connection.closed_reason is None:
                self._is_needed.acquire()
                if self._connection.try_reading():  # else the thread that reads passes on
                    self._read_while_unattended()

    def _read_while_unattended(self) -> None:
        self._thread_reads = True
        try:
            while self._is_unattended():
                self._connection.read_next()
        finally:
            self._thread_reads = False
            self._connection.done_reading()
        self.pass_on()
