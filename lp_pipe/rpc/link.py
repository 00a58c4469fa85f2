"""One connection of a client to its server, and what waits for frames on it."""

import contextlib
import itertools
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

from lp_pipe.connections import Connection, Frame, PulledConnection, frames
from lp_pipe.connections.kernel_calls import has_epoll
from lp_pipe.errors import DeadlineExceeded, Unavailable
from lp_pipe.rpc import codec, nesting
from lp_pipe.rpc.calls import CallFuture, PendingCall, Reply, SyncCall
from lp_pipe.rpc.codec import Payload
from lp_pipe.rpc.consuming import Inbox, Stream
from lp_pipe.rpc.expected import Expected
from lp_pipe.rpc.exposed import LIST_METHODS
from lp_pipe.rpc.owner import Owner
from lp_pipe.rpc.pool import DaemonPool
from lp_pipe.rpc.reading import Reading

T = TypeVar("T")

# Connections of dropped clients are closed here: the collector drops them anywhere, also inside of `connection.send`,
# or while a lock of all connections is held. Not where streams are: ending one may wait for a peer that reads nothing.
_closer = DaemonPool(1, "close dropped clients").survive_forks()


class Link:
    """Calls that wait for their replies, and streams whose items arrive; ids are never used twice.

    It belongs to the process that made it; in a forked child it is not open.
    """

    def __init__(self, connection: Connection, depth: int = 0) -> None:
        self.connection = connection
        self._depth = depth  # see nesting.py
        _closer.ensure_thread()  # not in `drop`: that must not take locks
        self._owner = Owner()
        self._expected = Expected()
        self._ids = itertools.count(1)
        self._reading: Reading | None = None
        if isinstance(connection, PulledConnection) and has_epoll():
            self._reading = Reading(connection, self._expected)
            connection.attach(self._on_frame, self._on_close)
            self._reading.begin()
        else:
            connection.start(self._on_frame, self._on_close)

    def is_open(self) -> bool:
        """Whether a call may be sent; a peer that has closed by now is noticed here, whoever reads."""
        if not self._owner.is_here:
            return False
        return self.connection.closed_reason is None and (self._reading is None or self._reading.look())

    def drop(self) -> None:
        """Nobody will use it any more; called wherever the collector drops the client."""
        if self._owner.is_here:
            _closer.submit(self.connection.close, "the client is gone")

    def call(self, method: str, payload: Payload, deadline: float | None) -> Reply | None:
        """Send a call and wait for the reply; None when there was none at the deadline (of time.monotonic)."""
        call = SyncCall()
        call_id = next(self._ids)
        try:
            try:
                self._expected.blocked[call_id] = call
                self._send(call_id, method, payload)
                if self._reading is not None:
                    self._reading.wait_for(call, deadline)
                else:
                    call.wait(deadline)
            finally:
                is_forgotten = self.forget(call_id)
                if self._reading is not None:
                    self._reading.pass_on()
        except BaseException:  # it may have interrupted the lines above
            self.forget(call_id)
            raise
        return None if is_forgotten else call.reply()

    def recover(self) -> None:
        """Undo what an operation of the calling thread has left half done, which an exception has interrupted."""
        if not self._owner.is_here:
            return
        self.connection.recover()
        if self._reading is not None:
            self._reading.recover()
            self._reading.pass_on()

    def start(self, method: str, payload: Payload, call: PendingCall) -> int:
        """Send a call whose reply goes to `call.deliver`; returns the call's id."""
        call_id = next(self._ids)
        try:
            self._expected.add(call_id, call)
            self._send(call_id, method, payload)
        except BaseException:  # a signal handler's: nobody has the call
            self.forget(call_id)
            raise
        if self._reading is not None:
            self._reading.pass_on()
        return call_id

    def wait_for(self, future: CallFuture, deadline: float | None) -> None:
        """A thread waits for this future now, and may read."""
        if self._reading is None:
            return
        if not nesting.depths.get(get_ident()) or not self._read_inside(future.done, deadline):
            self._operate(self._reading.wait_for_future, future, deadline)

    def _operate(self, operation: Callable[..., T], *args: Any) -> T:
        """Do what a signal handler may interrupt, and what it may end with an exception."""
        thread = get_ident()
        depth = nesting.depths.get(thread, 0)
        try:
            try:
                nesting.depths[thread] = max(depth, self._depth) + 1
                return operation(*args)
            finally:
                nesting.depths[thread] = depth
        except BaseException:
            nesting.depths[thread] = depth
            if depth <= self._depth:  # else an operation further down on the stack may be in the middle of this link
                self.recover()
            raise

    def read_for(self, inbox: Inbox, timeout_s: float | None) -> None:
        """Read until something is in the inbox, where no other thread can: this one reads, and was interrupted.

        Raises:
            Unavailable: it was interrupted in the middle of a frame.
        """
        if nesting.depths.get(get_ident()):
            self._read_inside(lambda: not inbox.is_empty, None if timeout_s is None else time.monotonic() + timeout_s)

    def _read_inside(self, is_enough: Callable[[], bool], deadline: float | None) -> bool:
        if self._reading is None or not self._operate(self._reading.read_inside, is_enough, deadline):
            return False
        # The interrupted code may wait in poll() for a reply that was just read: any reply ends that.
        self._send(next(self._ids), LIST_METHODS, codec.encode(((), {})))
        return True

    def attend(self) -> None:
        """Nobody may wait for what was started; it must be settled all the same."""
        if self._reading is not None and self._owner.is_here:
            self._operate(self._reading.attend)

    def _send(self, call_id: int, method: str, payload: Payload) -> None:
        try:
            self.connection.send(Frame(frames.CALL, call_id, method, payload.body, payload.buffers))
        except (Unavailable, frames.FrameError):
            if self.forget(call_id):
                raise
            # Else the end of the connection has settled the call already.

    def forget(self, call_id: int) -> bool:
        """Give a call up; False when its reply has come (or its failure), so that exactly one side settles it."""
        return self._expected.take(call_id) is not None

    def cancel(self, call_id: int) -> bool:
        """Like `forget`, and let the server know: it cancels an async handler."""
        is_forgotten = self.forget(call_id)
        if is_forgotten:
            self._send_cancel(call_id)
        return is_forgotten

    def waits_for(self, call_id: int) -> bool:
        """Whether the reply of a call is still to come."""
        return call_id in self._expected

    def expire(self, call_id: int, error: DeadlineExceeded | Unavailable) -> None:
        """Settle a call whose deadline has passed, or that nobody can watch for it, if it still waits."""
        call = self._expected.take(call_id)
        if call is not None:
            call.deliver(error)

    def end_stream(self, call_id: int) -> None:
        """Take no more of a stream; its generator is closed, unless it has ended."""
        if self._expected.inboxes.pop(call_id, None) is not None:
            self._send_cancel(call_id)

    def _send_cancel(self, call_id: int) -> None:
        if not self._owner.is_here:
            return  # the call, or stream, is the parent's
        with contextlib.suppress(Unavailable):
            self.send(Frame(frames.CANCEL, call_id))

    def send(self, frame: Frame) -> None:
        """Send what belongs to a call that has been sent already."""
        self._operate(self.connection.send, frame)

    def _on_frame(self, frame: Frame) -> None:
        try:
            self._deliver(frame)
        except BaseException as error:  # a signal handler's, for which this connection ends
            self._expected.fail_arrived(self._ended(f"an exception came while its reply was read: {error!r}"))
            raise

    def _deliver(self, frame: Frame) -> None:
        call = self._expected.take_arrived(frame.id)
        if frame.kind == frames.STREAM_OPEN:
            stream = self._open(frame.id)
            if call is not None:
                call.deliver(stream)
            # Else the call was given up meanwhile: nobody holds the stream, which closes it.
        elif call is not None:
            call.deliver(frame)
        else:
            inbox = self._expected.take_inbox(frame, is_last=frame.kind != frames.STREAM_ITEM)
            if inbox is not None:
                inbox.deliver(frame)
        self._expected.arrived = None

    def _open(self, call_id: int) -> Stream:
        inbox = self._expected.inboxes[call_id] = Inbox()
        if self.connection.closed_reason is not None:  # in one process another thread may have closed it meanwhile
            self._expected.fail(self._ended(self.connection.closed_reason))
        return Stream(inbox, self, call_id)

    @staticmethod
    def _ended(reason: str) -> Unavailable:
        return Unavailable(f"the connection ended during the call: {reason}")

    def _on_close(self, reason: str) -> None:
        self._expected.fail(self._ended(reason))
        if self._reading is not None:
            self._reading.end()
