"""The receiving side of a process's channels: one listener, and a connection for each channel."""

import threading

import torch

from lp_pipe import connections
from lp_pipe.channels import kinds, rank_addresses, registry
from lp_pipe.channels.messages import Opening
from lp_pipe.channels.packing import CPU
from lp_pipe.channels.receiver import Receiver
from lp_pipe.connections import Connection, Frame, PulledConnection, frames
from lp_pipe.connections.resource_limits import describe_rejection
from lp_pipe.errors import ChannelClosed


class ChannelHub:
    """Matches senders and receivers by the channel's name, whichever comes first.

    name: this node's label, for messages ("stages/1").
    """

    def __init__(self, endpoint: str, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._receivers: dict[str, Receiver] = {}
        self._unmatched: dict[str, Receiver] = {}
        self._waiting: dict[str, _IncomingSender] = {}
        self._closed_reason: str | None = None
        self._listener = connections.listen(endpoint, lambda connection: _IncomingSender(self, connection).start())
        self.endpoint = self._listener.endpoint

    def receiver(self, channel: str, credits: int = 4, *, device: torch.device = CPU) -> Receiver:
        """Make the channel's receiving end; at most `credits` values are in flight.

        A sender without credits goes on when one is back, or half of them if there are four or more.

        device: where tensors go that the sender has on a GPU, if they can get there without the host.

        Raises:
            ValueError: the channel has an open receiver already, or credits is below 1.
            ChannelClosed: the hub is closed.
        """
        if credits < 1:
            raise ValueError(f"channel {channel!r} of {self.name}: credits must be at least 1, got {credits}")
        receiver = Receiver(channel, credits, device, self.name)
        with self._lock:
            if self._closed_reason is not None:
                raise ChannelClosed(f"channel {channel!r} of {self.name}: {self._closed_reason}")
            existing = self._receivers.get(channel)
            if existing is not None and existing.is_open:
                raise ValueError(f"channel {channel!r} of {self.name} already has a receiver: close it first")
            self._forget_closed()
            self._receivers[channel] = receiver
            incoming = self._waiting.pop(channel, None)
            if incoming is None:
                self._unmatched[channel] = receiver
        if incoming is not None:
            incoming.attach(receiver)
        return receiver

    def close(self, reason: str) -> None:
        """Close all channels; their senders get the reason."""
        with self._lock:
            self._closed_reason = reason
            receivers, waiting = list(self._receivers.values()), list(self._waiting.values())
        self._listener.close(reason)
        for receiver in receivers:
            receiver.close(reason)
        for incoming in waiting:
            incoming.connection.close(reason)

    def _forget_closed(self) -> None:
        """Forget closed receivers, which keep their senders' memory: stages that join again use new names."""
        self._receivers = {channel: receiver for channel, receiver in self._receivers.items() if receiver.is_open}

    def _opened(self, incoming: "_IncomingSender") -> None:
        """Match a sender that has named its channel with the receiver, or keep it."""
        channel = incoming.opening.channel
        with self._lock:
            receiver = self._unmatched.pop(channel, None)
            refusal = self._closed_reason
            if receiver is None and refusal is None:
                refusal = self._keep(incoming)
        if refusal is not None:
            incoming.connection.close(refusal)
        elif receiver is not None:
            incoming.attach(receiver)

    def _keep(self, incoming: "_IncomingSender") -> str | None:
        """Keep a sender until its receiver is made; return the reason if it cannot be kept."""
        channel = incoming.opening.channel
        existing, waiting = self._receivers.get(channel), self._waiting.get(channel)
        if (existing is not None and existing.is_open) or (waiting is not None and waiting.is_open):
            return f"channel {channel!r} of {self.name} already has a sender"
        self._waiting[channel] = incoming
        return None


class _IncomingSender:
    """A sender's connection, before and after its receiver is made."""

    opening: Opening

    def __init__(self, hub: ChannelHub, connection: Connection) -> None:
        self.connection = connection
        self._hub = hub
        self._receiver: Receiver | None = None

    @property
    def is_open(self) -> bool:
        return self.connection.closed_reason is None

    @property
    def _kind(self) -> kinds.ChannelKind:
        return kinds.named(self.opening.kind)

    def start(self) -> None:
        if not isinstance(self.connection, PulledConnection) or not kinds.is_shm_supported():
            self.connection.start(self._on_frame, self._on_close)
            return
        self.connection.make_interruptible()
        self.connection.attach(self._on_frame, self._on_close)
        if self.connection.try_reading():
            name = f"open a channel of {self._hub.name}"
            threading.Thread(target=self._read_until_attached, args=(self.connection,), name=name, daemon=True).start()

    def attach(self, receiver: Receiver) -> None:
        self._receiver = receiver
        try:
            address = rank_addresses.receiver_address(self._hub.endpoint, self.opening.address)
            transport = registry.make_transport_receiver(self.opening.kind, address, receiver.device)
        except OSError as error:
            self._refuse(receiver, f"{self._hub.name} cannot reach its sender at {self.opening.address}: {error}")
            return
        except ValueError as error:
            self._refuse(receiver, f"{self._hub.name}: {error}")
            return
        peer = self.opening.sender or self.connection.peer
        try:
            receiver._attach(self.connection, transport, peer, has_queue=self.opening.has_queue)
        except Exception as error:  # out of descriptors, memory or threads
            self._refuse(receiver, f"{self._hub.name}: {describe_rejection(error)}")
            return
        if self.connection.closed_reason is not None:
            receiver._on_close(self.connection.closed_reason)  # it closed before the receiver was attached

    def _refuse(self, receiver: Receiver, reason: str) -> None:
        self.connection.close(reason)
        receiver._on_close(reason)

    def _read_until_attached(self, connection: PulledConnection) -> None:
        """Read until the receiver takes over, or to the end if it does not read this connection itself."""
        while self.is_open and (self._receiver is None or not self._kind.is_read_by_owner(connection)):
            if connection.wait(None):
                connection.read()
        try:
            if self.is_open and self._receiver is not None and self._kind.is_streamed:
                self._receiver._read_in_background(connection)  # reading here keeps the descriptor open
        finally:
            connection.done_reading()
            if self._receiver is not None:
                self._receiver._on_reader_left()

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == frames.CHANNEL_OPEN:
            self.opening = Opening.of(frame)
            self._hub._opened(self)
            return
        assert self._receiver is not None, "a sender sends only when it has credits"
        if frame.kind == frames.CHANNEL_NOTE:
            self._receiver._on_note(bytes(frame.body))
            return
        self._receiver._on_data(frame)

    def _on_close(self, reason: str) -> None:
        if self._receiver is not None:
            self._receiver._on_close(reason)
