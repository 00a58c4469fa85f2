"""The sending end of a channel."""

import threading
import time
from typing import Any

import torch
from torch import Tensor

from lp_pipe import connections
from lp_pipe.channels import kinds, rank_addresses, registry
from lp_pipe.channels.base import NoRoomError, TransferError, TransportSender
from lp_pipe.channels.messages import AS_FRAME, WAKE_UP, AbortedOperations, Opening, data_frame
from lp_pipe.channels.packing import CPU, Layout, Packer
from lp_pipe.channels.queued_connection import QueuedConnection
from lp_pipe.channels.reading_condition import ReadingCondition
from lp_pipe.channels.shm_queue import ShmQueue, is_shm_queue_supported
from lp_pipe.connections import Connection, Frame, PulledConnection, frames
from lp_pipe.connections.resource_limits import describe_error
from lp_pipe.errors import ChannelClosed, Unavailable
from lp_pipe.telemetry import edges, tracing, waits


class Sender:
    """A channel's sending end, made by `open_sender`. Any thread may use it."""

    def __init__(
        self,
        connection: Connection,
        transport: TransportSender,
        label: str,
        waits_for: waits.Target,
        *,
        carries_gpu: bool,
        channel: str = "",
    ) -> None:
        self.carries_gpu = carries_gpu
        self._connection = connection
        self._transport = transport
        self._label = label
        self._waits_for = waits_for
        self._channel = channel
        self._edge = edges.counter_to(waits_for.peer, is_channel=True)
        self._num_sent = 0
        self._packer = Packer(carries_gpu=carries_gpu)
        self._layout: Layout | None = None  # the one that the receiver has
        # Held for a whole send, so that messages are sent in the order in which they took their layouts. The state's
        # lock is never held while sending: in one process the receiver's thread may be about to take it.
        self._send_lock = threading.Lock()
        self._state = threading.Condition(threading.Lock())
        self._reading = ReadingCondition(self._state)
        self._queue: ShmQueue | None = None
        self._total_credits = 0
        self._credits = 0  # granted and returned by frames
        self._abort: AbortedOperations | None = None
        self._closed_reason: str | None = None

    def send(self, tag: int, value: Any) -> None:
        """Send a pytree of tensors and picklable leaves. Waits for a credit, but not until the value has arrived.

        Tensors are on the CPU, or on a GPU if the channel has `carries_gpu`. requires_grad is not sent. The caller may
        change the tensors on return; those of a GPU in work that is queued on the current stream afterwards.

        tag: the number of the operation (step) that the value belongs to.

        Raises:
            ChannelClosed: the peer closed or died, or this operation was aborted.
            OSError: there are no descriptors or no memory for this message; the channel is unchanged.
        """
        recorder, start = tracing.recorder, time.monotonic()
        with self._send_lock:
            layout, tensors = self._packer.pack(value)
            header = b"" if layout is self._layout else layout.encode()
            if self._queue is not None and not self._queue.is_being_read():
                self._reading.poll()  # learns whether the receiver is gone: writing to memory would not fail
            self._take_credit(tag)
            self._layout = layout
            self._send(tag, layout, header, tensors)
            self._num_sent = number = self._num_sent + 1
        self._edge.number += 1
        self._edge.bytes_sent += layout.size_bytes
        if recorder is not None:
            to, flow = self._waits_for.peer, f"{self._channel}>{self._waits_for.peer}#{number}"
            recorder.add("send", tracing.TRANSFER, start, time.monotonic(), flow=flow, to=to, bytes=layout.size_bytes)

    @property
    def keeps_on_gpu(self) -> bool:
        """Whether a GPU's tensors arrive on a GPU without a way through the host; known once a value was sent."""
        return self._transport.keeps_on_gpu()

    def abort(self, tag: int, reason: str) -> None:
        """Make sends with this tag and lower ones raise ChannelClosed, also one that waits for a credit."""
        with self._state:
            if self._abort is None or tag >= self._abort.tag:
                self._abort = AbortedOperations(tag, reason)
            self._reading.wake()

    def close(self, reason: str = "closed") -> None:
        """Close the channel; the receiver still gets what was sent, and then the reason."""
        with self._state:  # before closing, or the peer's answer would be taken for its death
            self._closed_reason = self._closed_reason or reason
            self._reading.wake()
        self._transport.finish()
        self._connection.close(reason)
        self._transport.close(reason)

    def _begin(self, kind: kinds.ChannelKind) -> None:
        carrier = self._connection.inner if isinstance(self._connection, QueuedConnection) else self._connection
        if not isinstance(carrier, PulledConnection) or not kind.is_read_by_owner(carrier):
            self._connection.start(self._on_frame, self._on_close)
            return
        carrier.make_interruptible()
        attach = self._connection.attach if isinstance(self._connection, QueuedConnection) else carrier.attach
        attach(self._on_frame, self._on_close)
        self._reading.attach(carrier)

    def _send(self, tag: int, layout: Layout, header: bytes, tensors: list[Tensor]) -> None:
        try:
            token, buffers = self._transport.write(layout, tensors, self._total_credits)
            if self._queue is None:
                self._connection.send(data_frame(tag, header, token, buffers))
                return
            if header or buffers:
                self._connection.send(data_frame(tag, header, token, buffers))
                token = AS_FRAME
            if self._queue.publish(tag, token):
                self._connection.send(WAKE_UP)
        except NoRoomError as error:
            self._undo_send()
            raise NoRoomError(error.errno, f"{self._label}: {error.strerror}") from error
        except (Unavailable, TransferError) as error:
            raise self._closed_error(self._failure_reason(str(error))) from error
        except BaseException as error:  # no memory, Ctrl+C: the receiver could not read what follows
            self.close(f"the sender failed to send: {type(error).__name__}: {error}")
            raise

    def _take_credit(self, tag: int) -> None:
        with self._state:
            if not self._has_credit() and self._end_reason(tag) is None:
                with waits.waiting(waits.SEND, self._waits_for, f"{self._label}, operation {tag}"):
                    self._reading.wait_for(lambda: self._has_credit() or self._end_reason(tag) is not None)
            reason = self._end_reason(tag)
            if reason is not None:
                raise self._closed_error(reason)
            self._credits -= 1

    def _failure_reason(self, error: str) -> str:
        """Return why sending failed, which the peer may have said."""
        self._reading.poll()
        reason = self._reading.wait_for_reason(lambda: self._closed_reason)
        if reason is None:
            self.close(error)
        return reason or error

    def _undo_send(self) -> None:
        """Undo a send of which the receiver has got nothing: neither a layout nor a message that took a credit."""
        self._layout = None
        with self._state:
            self._credits += 1
            self._state.notify_all()

    def _has_credit(self) -> bool:
        returned = self._queue.taken if self._queue is not None else 0
        return self._credits + returned > 0

    def _end_reason(self, tag: int) -> str | None:
        if self._abort is not None and tag <= self._abort.tag:
            return self._abort.reason
        return self._closed_reason

    def _closed_error(self, reason: str) -> ChannelClosed:
        return ChannelClosed(f"{self._label}: {reason}")

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == frames.CHANNEL_NOTE:
            self._transport.on_note(bytes(frame.body))
            return
        is_grant = frame.kind == frames.CHANNEL_OPEN
        if is_grant:
            if frame.body and not self._open_queue(bytes(frame.body)):
                return
            self._transport.begin(lambda note: self._connection.send(Frame(frames.CHANNEL_NOTE, body=note)))
        else:
            self._transport.release(frame.id)
        with self._state:
            if is_grant:
                self._total_credits = frame.id
            self._credits += frame.id if is_grant or not self._transport.has_tokens else 1
            self._state.notify_all()

    def _open_queue(self, announced: bytes) -> bool:
        try:
            self._queue = ShmQueue.open(announced)
        except OSError as error:
            self._connection.close(f"the sender cannot open the receiver's memory: {describe_error(error)}")
            return False
        self._reading.doorbell = self._queue.sender_doorbell
        return True

    def _on_close(self, reason: str) -> None:
        with self._state:
            self._closed_reason = self._closed_reason or reason
            self._reading.wake()
        self._transport.close(reason)


def open_sender(
    endpoint: str, channel: str, *, kind: str = "auto", name: str = "", peer: str = "", device: torch.device = CPU
) -> Sender:
    """Connect to the hub at `endpoint`; its receiver may be made before or after.

    kind: "auto", or a kind that fits the hub's endpoint (kinds.py).
    name, peer: labels of this node and of the hub's ("stages/1"), for messages at both ends.
    device: where the sent tensors are.

    Raises:
        ValueError: the kind does not fit the endpoint, or the device.
        Unavailable: nothing listens there.
    """
    chosen = kinds.choose(kind, endpoint, is_on_gpu=device.type == "cuda")
    where = endpoint.partition("#")[0]  # without the token
    label = f"channel {channel!r} to {peer or where}"
    try:
        address = rank_addresses.sender_address(endpoint)
        transport = registry.make_transport_sender(chosen.name, address, device)
        carrier = connections.connect(chosen.sender_endpoint(endpoint))
        connection = QueuedConnection(carrier) if chosen.is_sent_by_thread else carrier
        target = waits.Target(where, peer=peer)
        sender = Sender(connection, transport, label, target, carries_gpu=chosen.carries_gpu, channel=channel)
    except OSError as error:  # Unavailable is one, too
        raise Unavailable(f"{label}: {describe_error(error)}") from error
    has_queue = is_shm_queue_supported and chosen.has_shm_queue and isinstance(carrier, PulledConnection)
    try:
        sender._begin(chosen)
        connection.send(Opening(channel, chosen.name, name, has_queue, address).frame())
    except BaseException as error:  # for example no descriptors or threads are left
        why = sender._failure_reason(str(error)) if isinstance(error, Unavailable) else describe_error(error)
        sender.close(why)
        if isinstance(error, OSError):
            raise Unavailable(f"{label}: {why}") from error
        raise
    return sender
