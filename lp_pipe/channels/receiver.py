"""The receiving end of a channel."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from lp_pipe.channels import background_reader, packing
from lp_pipe.channels.base import TransferError, TransportReceiver
from lp_pipe.channels.messages import AS_FRAME, WAKE_UP, AbortedOperations, tag_and_layout
from lp_pipe.channels.reading_condition import ReadingCondition
from lp_pipe.channels.shm_queue import MANY_CREDITS, ShmQueue
from lp_pipe.connections import Connection, Frame, PulledConnection, frames
from lp_pipe.errors import ChannelClosed, Unavailable
from lp_pipe.telemetry import tracing, waits


class Receiver:
    """A channel's receiving end, made by `ChannelHub.receiver`. Any thread may use it."""

    def __init__(self, channel: str, credits: int, device: torch.device = packing.CPU, node: str = "") -> None:
        self.channel = channel
        self._node = node
        self._num_accepted = 0
        self.credits = credits
        self.device = device
        self._waits_for = waits.Target()
        self._connection: Connection | None = None
        self._transport: TransportReceiver | None = None
        self._queue: ShmQueue | None = None
        self._unreturned = 0  # credits that will go back together
        self._framed: deque[Frame] = deque()  # messages that come before their entries in the queue
        self._layout: _PackedLayout | None = None
        self._state = threading.Condition(threading.Lock())
        self._reading = ReadingCondition(self._state)
        self._arrived: deque[_Message] = deque()
        self._abort: AbortedOperations | None = None
        self._closed_reason: str | None = None
        self._is_closed_here = False

    def receive(self, tag: int, timeout_s: float | None = None) -> Any:
        """Return the next value with this tag; its tensors are the caller's own.

        Messages with a lower tag, left over from an aborted operation, are dropped. Values that were sent before the
        sender closed or died are still received.

        Raises:
            ChannelClosed: the peer closed or died, or this operation was aborted.
            TimeoutError: nothing came within `timeout_s`.
        """
        recorder, start = tracing.recorder, time.monotonic()
        deadline = None if timeout_s is None else start + timeout_s
        while (message := self._next_message(tag, deadline, timeout_s)).tag < tag:
            self._drop(message)
        assert self._transport is not None
        try:
            layout = message.layout.value
            return packing.unpack(layout, self._transport.read(layout, message.parcel))
        except TransferError as error:
            raise ChannelClosed(f"{self._label}: {self._failure_reason(str(error))}") from error
        finally:
            self._return_credit(message.token)
            if recorder is not None:
                flow = f"{self.channel}>{self._node}#{message.number}"
                args = {"flow": flow, "from": self._waits_for.peer}
                recorder.add("receive", tracing.TRANSFER, start, time.monotonic(), **args)

    def abort(self, tag: int, reason: str) -> None:
        """Make receives with this tag and lower ones raise ChannelClosed, also a blocked one; drop their messages."""
        with self._state:
            if self._abort is None or tag >= self._abort.tag:
                self._abort = AbortedOperations(tag, reason)
            dropped = [message for message in self._arrived if message.tag <= tag]
            self._arrived = deque(message for message in self._arrived if message.tag > tag)
            self._reading.wake()
        for message in dropped:
            self._drop(message)

    def poll(self) -> None:
        """Read what has arrived, without waiting: messages of aborted operations give their credits back."""
        self._reading.poll()
        with self._state:
            self._has_arrived()

    def close(self, reason: str = "closed") -> None:
        """Close the channel and drop what was not received; the sender gets the reason."""
        with self._state:
            self._is_closed_here = True
            self._closed_reason = self._closed_reason or reason
            if self._queue is not None:
                self._queue.close()
            self._arrived.clear()
            self._reading.wake()
            connection, transport = self._connection, self._transport
        if connection is not None and transport is not None:
            connection.close(reason)
            transport.close(reason)
            if self._reading.watched is not None:
                background_reader.shared.forget(self._reading.watched)

    @property
    def is_open(self) -> bool:
        return self._closed_reason is None

    def _next_message(self, tag: int, deadline: float | None, timeout_s: float | None) -> "_Message":
        """Wait for the oldest message, which has this tag or a lower one, and remove it."""
        with self._state:
            if not self._has_arrived() or self._abort is not None:
                remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._wait(tag, remaining):
                    raise TimeoutError(f"{self._label}: nothing with tag {tag} came within {timeout_s} s")
                reason = self._end_reason(tag)
                if reason is not None:
                    raise ChannelClosed(f"{self._label}: {reason}")
            first = self._arrived[0].tag
            assert first <= tag, f"{self._label}: tag {first} came while {tag} was asked for; the order is broken"
            return self._arrived.popleft()

    def _wait(self, tag: int, timeout_s: float | None) -> bool:
        """Wait for a message or a reason why there will be none; return False when the time has passed."""
        if self._has_arrived() or self._end_reason(tag) is not None:
            return True
        what = f"channel {self.channel!r}, operation {tag}"
        with waits.waiting(waits.RECEIVE, self._waits_for, what, timeout_s is not None):
            return self._reading.wait_for(lambda: self._has_arrived() or self._end_reason(tag) is not None, timeout_s)

    def _has_arrived(self) -> bool:
        """Read the shared-memory queue; return whether there is a message. Called with the state's lock."""
        queue = self._queue
        while queue is not None and (entry := queue.next()) is not None:
            tag, token = entry
            if token == AS_FRAME and not self._framed:
                break  # its frame is still to be read
            message = self._message_of(self._framed.popleft()) if token == AS_FRAME else self._message(tag, token)
            queue.advance()
            if self._is_wanted(message):
                self._arrived.append(message)
            else:
                self._drop(message)
        return bool(self._arrived)

    def _end_reason(self, tag: int) -> str | None:
        if self._abort is not None and tag <= self._abort.tag:
            return self._abort.reason
        return None if self._arrived else self._closed_reason

    @property
    def _label(self) -> str:
        peer = self._waits_for.peer or "its sender, which has not connected yet"
        return f"channel {self.channel!r} from {peer}"

    def _drop(self, message: "_Message") -> None:
        assert self._transport is not None
        token = message.token  # the closure must not keep the message, and so its memory
        self._transport.drop(message.parcel, lambda: self._return_credit(token))

    def _return_credit(self, token: int) -> None:
        assert self._connection is not None
        queue = self._queue
        if queue is not None and not queue.take():
            return
        with contextlib.suppress(Unavailable):  # the sender is gone and needs no credit
            if queue is None:
                self._send_credit(token)
            else:
                self._connection.send(WAKE_UP)

    def _send_credit(self, number: int) -> None:
        assert self._connection is not None and self._transport is not None
        if not self._transport.has_tokens:
            with self._state:
                self._unreturned += 1
                if self.credits >= MANY_CREDITS and self._unreturned < self.credits - self.credits // 2:
                    return
                number, self._unreturned = self._unreturned, 0
        self._connection.send(Frame(frames.CHANNEL_CREDIT, number))

    def _failure_reason(self, error: str) -> str:
        """Return why a transfer failed, which the connection may know better."""
        reason = self._reading.wait_for_reason(lambda: self._closed_reason)
        if reason is None:
            self.close(error)
        return reason or error

    def _attach(self, connection: Connection, transport: TransportReceiver, peer: str, *, has_queue: bool) -> None:
        """Join both ends, called by the hub. The sender begins when it gets the credits."""
        announcement = b""
        with self._state:
            self._connection, self._transport, self._waits_for.peer = connection, transport, peer
            if has_queue:
                self._queue, announcement = ShmQueue.make(self.credits)
                self._reading.doorbell = self._queue.receiver_doorbell
            self._reading.attach(connection)
            self._reading.wake()
            reason = self._closed_reason
        if reason is not None:
            connection.close(reason)
            return
        transport.begin(lambda note: connection.send(Frame(frames.CHANNEL_NOTE, body=note)))
        with contextlib.suppress(Unavailable):  # _on_close follows
            connection.send(Frame(frames.CHANNEL_OPEN, self.credits, body=announcement))

    def _read_in_background(self, connection: PulledConnection) -> None:
        """Let the background reader read while no thread waits here; called by the one thread that reads."""
        self._reading.watched = background_reader.shared.watch(connection, self._wake)

    def _on_reader_left(self) -> None:
        """Take over from the thread that has read the connection so far."""
        self.poll()  # threads that began to wait meanwhile could not read
        self._wake()

    def _wake(self) -> None:
        """Wake the waiting threads: no other thread reads the connection now."""
        with self._state:
            self._state.notify_all()

    def _on_data(self, frame: Frame) -> None:
        with self._state:
            has_queue = self._queue is not None
            if has_queue:
                self._framed.append(frame)
                self._state.notify_all()
        if not has_queue:
            self._add(self._message_of(frame))

    def _add(self, message: "_Message") -> None:
        with self._state:
            is_wanted = self._is_wanted(message)
            if is_wanted:
                self._arrived.append(message)
                self._state.notify_all()
        if not is_wanted:
            self._drop(message)

    def _is_wanted(self, message: "_Message") -> bool:
        return not self._is_closed_here and (self._abort is None or message.tag > self._abort.tag)

    def _message_of(self, frame: Frame) -> "_Message":
        tag, layout = tag_and_layout(frame)
        if layout:
            self._layout = _PackedLayout(layout)
        return self._message(tag, frame.id, frame.buffers)

    def _message(self, tag: int, token: int, buffers: Sequence[Any] = ()) -> "_Message":
        assert self._transport is not None and self._layout is not None
        self._num_accepted += 1
        return _Message(tag, token, self._layout, self._transport.accept(token, buffers), self._num_accepted)

    def _on_note(self, note: bytes) -> None:
        assert self._transport is not None
        self._transport.on_note(note)

    def _on_close(self, reason: str) -> None:
        with self._state:
            self._closed_reason = self._closed_reason or reason
            self._state.notify_all()
        if self._transport is not None:
            self._transport.end(reason)


class _PackedLayout:
    """A layout that the first receive() unpickles: the connection's thread must not run users' constructors."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @cached_property
    def value(self) -> packing.Layout:
        return packing.Layout.decode(self._data)


class _Message(NamedTuple):
    tag: int
    token: int
    layout: _PackedLayout
    parcel: Any
    number: int  # the first message of the channel has 1
