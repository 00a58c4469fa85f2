"""A client's connection to its server, and the calls that wait for frames on it."""

import contextlib
import itertools
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

from lp_pipe.connections import Connection, Frame, PulledConnection, frames, nesting
from lp_pipe.connections.kernel_calls import has_epoll
from lp_pipe.errors import DeadlineExceeded, Unavailable
from lp_pipe.rpc import codec
from lp_pipe.rpc.calls import CallFuture, PendingCall, PendingCalls, Reply, SyncCall
from lp_pipe.rpc.codec import Payload
from lp_pipe.rpc.daemon_pool import DaemonPool
from lp_pipe.rpc.fork_guard import ForkGuard
from lp_pipe.rpc.reply_reader import ReplyReader
from lp_pipe.rpc.served_methods import LIST_METHODS
from lp_pipe.rpc.stream_consumer import Inbox, ItemStream

T = TypeVar("T")

# Connections of dropped clients are closed here: the garbage collector drops clients anywhere, also inside
# `connection.send` or while a lock of all connections is held. Streams have a thread of their own: ending one may wait
# for a peer that reads nothing.
_closer = DaemonPool(1, "close dropped clients").survive_forks()


class ClientConnection:
    """A connection with calls that wait for replies and streams that wait for items. Ids are never used twice.

    It belongs to the process that made it; in a forked child it is not open.
    """

    def __init__(self, connection: Connection, depth: int = 0) -> None:
        self.connection = connection
        self._depth = depth  # the depth of nesting, see nesting.py
        _closer.ensure_thread()  # not in `drop`, which must not take locks
        self._fork_guard = ForkGuard()
        self._pending = PendingCalls()
        self._ids = itertools.count(1)
        self._reader: ReplyReader | None = None
        if isinstance(connection, PulledConnection) and has_epoll():
            self._reader = ReplyReader(connection, self._pending)
            connection.attach(self._on_frame, self._on_close)
            self._reader.begin()
        else:
            connection.start(self._on_frame, self._on_close)

    def is_open(self) -> bool:
        """Return whether a call may be sent; notices a peer that has closed, whichever thread reads."""
        if not self._fork_guard.is_here:
            return False
        return self.connection.closed_reason is None and (self._reader is None or self._reader.read_available())

    def drop(self) -> None:
        """Close the connection, which is used no more; called wherever the garbage collector drops the client."""
        if self._fork_guard.is_here:
            _closer.submit(self.connection.close, "the client is gone")

    def call(self, method: str, payload: Payload, deadline: float | None) -> Reply | None:
        """Send a call and wait for the reply; None when there was none at the deadline (of time.monotonic)."""
        call = SyncCall()
        call_id = next(self._ids)
        blocked, reader = self._pending.blocked, self._reader
        try:
            try:
                blocked[call_id] = call
                self._send(call_id, method, payload)
                if reader is not None:
                    reader.wait_for(call, deadline)
                else:
                    call.wait(deadline)
            finally:
                is_forgotten = blocked.pop(call_id, None) is not None
                if reader is not None:
                    reader.pass_on()
        except BaseException:  # it may have interrupted the lines above
            blocked.pop(call_id, None)
            raise
        return None if is_forgotten else call.reply()

    def recover(self) -> None:
        """Undo what an operation of the calling thread has left half done when an exception interrupted it."""
        if not self._fork_guard.is_here:
            return
        self.connection.recover()
        if self._reader is not None:
            self._reader.recover()
            self._reader.pass_on()

    def start(self, method: str, payload: Payload, call: PendingCall) -> int:
        """Send a call and return its id; the reply goes to `call.deliver`."""
        call_id = next(self._ids)
        try:
            self._pending.add(call_id, call)
            self._send(call_id, method, payload)
        except BaseException:  # raised by a signal handler, so the caller does not get the call
            self.forget(call_id)
            raise
        if self._reader is not None:
            self._reader.pass_on()
        return call_id

    def wait_for(self, future: CallFuture, deadline: float | None) -> None:
        """Let the calling thread wait for this future; it may read the connection."""
        if self._reader is None:
            return
        if not nesting.depths.get(get_ident()) or not self._read_inside(future.done, deadline):
            self._operate(self._reader.wait_for_future, future, deadline)

    def _operate(self, operation: Callable[..., T], *args: Any) -> T:
        """Run an operation that a signal handler may interrupt, and end with an exception."""
        thread = get_ident()
        depth = nesting.depths.get(thread, 0)
        try:
            try:
                nesting.depths[thread] = (depth if depth > self._depth else self._depth) + 1
                return operation(*args)
            finally:
                nesting.depths[thread] = depth
        except BaseException:
            nesting.depths[thread] = depth
            if depth <= self._depth:  # otherwise an operation further down on the stack may be using this connection
                self.recover()
            raise

    def read_for(self, inbox: Inbox, timeout_s: float | None) -> None:
        """Read until the inbox has something, in code that has interrupted the reading thread."""
        if nesting.depths.get(get_ident()):
            self._read_inside(lambda: not inbox.is_empty, None if timeout_s is None else time.monotonic() + timeout_s)

    def _read_inside(self, is_enough: Callable[[], bool], deadline: float | None) -> bool:
        if self._reader is None or not self._operate(self._reader.read_inside, is_enough, deadline):
            return False
        # The interrupted code may wait in poll() for a reply that was just read here: any reply ends that wait.
        self._send(next(self._ids), LIST_METHODS, codec.encode(((), {})))
        return True

    def read_in_background(self) -> None:
        """Make sure that replies are read even if no thread waits for them."""
        if self._reader is not None and self._fork_guard.is_here:
            self._operate(self._reader.read_in_background)

    def _send(self, call_id: int, method: str, payload: Payload) -> None:
        try:
            self.connection.send(Frame(frames.CALL, call_id, method, payload.body, payload.buffers))
        except (Unavailable, frames.FrameError):
            if self.forget(call_id):
                raise
            # Otherwise the end of the connection has settled the call already.

    def forget(self, call_id: int) -> bool:
        """Give a call up; False when its reply (or failure) has arrived, so that exactly one side settles it."""
        return self._pending.take(call_id) is not None

    def cancel(self, call_id: int) -> bool:
        """Give a call up and tell the server, which cancels an async handler."""
        is_forgotten = self.forget(call_id)
        if is_forgotten:
            self._send_cancel(call_id)
        return is_forgotten

    def waits_for(self, call_id: int) -> bool:
        """Return whether the reply of a call has not arrived yet."""
        return call_id in self._pending

    def expire(self, call_id: int, error: DeadlineExceeded | Unavailable) -> None:
        """Settle a call that still waits with the error: its deadline has passed, or no thread can watch it."""
        call = self._pending.take(call_id)
        if call is not None:
            call.deliver(error)

    def end_stream(self, call_id: int) -> None:
        """Stop a stream; its generator is closed, unless it has ended."""
        if self._pending.inboxes.pop(call_id, None) is not None:
            self._send_cancel(call_id)

    def _send_cancel(self, call_id: int) -> None:
        if not self._fork_guard.is_here:
            return  # the call or stream belongs to the parent process
        with contextlib.suppress(Unavailable):
            self.send(Frame(frames.CANCEL, call_id))

    def send(self, frame: Frame) -> None:
        """Send a frame of a call that was sent already."""
        self._operate(self.connection.send, frame)

    def _on_frame(self, frame: Frame) -> None:
        pending = self._pending
        try:
            call = pending.take_arrived(frame.id)
            if call is None or frame.kind == frames.STREAM_OPEN:
                self._deliver_to_stream(frame, call)
            else:
                call.deliver(frame)
            pending.arrived = None
        except BaseException as error:  # raised by a signal handler; the connection ends
            pending.fail_arrived(self._ended(f"an exception came while its reply was read: {error!r}"))
            raise

    def _deliver_to_stream(self, frame: Frame, call: PendingCall | None) -> None:
        if frame.kind == frames.STREAM_OPEN:
            stream = self._open(frame.id)
            if call is not None:
                call.deliver(stream)
            # Otherwise the call was given up meanwhile; nothing refers to the stream, so it closes.
        else:
            inbox = self._pending.take_inbox(frame, is_last=frame.kind != frames.STREAM_ITEM)
            if inbox is not None:
                inbox.deliver(frame)

    def _open(self, call_id: int) -> ItemStream:
        inbox = self._pending.inboxes[call_id] = Inbox()
        if self.connection.closed_reason is not None:  # within one process another thread may have closed it meanwhile
            self._pending.fail(self._ended(self.connection.closed_reason))
        return ItemStream(inbox, self, call_id)

    @staticmethod
    def _ended(reason: str) -> Unavailable:
        return Unavailable(f"the connection ended during the call: {reason}")

    def _on_close(self, reason: str) -> None:
        self._pending.fail(self._ended(reason))
        if self._reader is not None:
            self._reader.end()
