"""The base classes of transports, which carry the tensors' bytes from a sender to its receiver.

Credits, order, closing and failures are the same for all channels. Only the transport has several forms.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lp_pipe.channels.packing import Layout
from lp_pipe.connections.routes import LOOPBACK
from lp_pipe.errors import LpPipeError

Notify = Callable[[bytes], None]


class TransferError(LpPipeError):
    """The bytes cannot be sent, or will not arrive: the other end is gone, or this one is closing."""


class NoRoomError(LpPipeError, OSError):
    """A shortage of descriptors or memory for one message. Nothing of it was sent, and others may follow."""


class TransportEnd:
    """An end of a transport. Both ends may send each other notes over the channel's connection.

    The connection's thread calls all methods, or the thread that closes the channel. They must not block for long.

    address: of this host, where a transport listens that makes connections of its own.
    has_tokens: whether each message has a token that comes back when it was received; else several credits come back at
        once, without tokens.
    """

    address = LOOPBACK
    has_tokens = True

    def begin(self, notify: Notify) -> None:
        """Start: both ends are there. `notify` sends a note to the other end, which may get it before its own `begin`.

        `notify` raises Unavailable once the connection is closed.
        """

    def on_note(self, note: bytes) -> None:
        """Handle a note of the other end."""

    def close(self, reason: str) -> None:
        """Release threads that wait in here with a TransferError, and everything that is kept. Idempotent."""


class TransportSender(TransportEnd, ABC):
    """The sending end. One thread at a time calls `write`, the connection's thread calls `release`."""

    @abstractmethod
    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        """Send the tensors' bytes; return what goes into the message: a token, and the frame's buffers.

        layout: the same object as for the previous message if nothing has changed.
        credits: the number of tokens that are in use at most.

        Raises:
            TransferError: the channel was closed meanwhile.
            NoRoomError: this message cannot be sent; nothing has changed.
        """

    def release(self, token: int) -> None:
        """Free what the message used: it was received or dropped. Not called with a shared-memory queue."""

    def keeps_on_gpu(self) -> bool:
        """Return whether a GPU's tensors arrive on a GPU without a way through the host."""
        return False

    def finish(self) -> None:
        """Wait before an orderly closing until the receiver has the bytes, unless it takes too long."""


class TransportReceiver(TransportEnd, ABC):
    """The receiving end."""

    @abstractmethod
    def accept(self, token: int, buffers: Sequence[Any]) -> Any:
        """Take what came with a message, without touching the bytes; return the payload for `read`.

        The connection's thread calls this for every message, in order, and must not be held up.
        """

    @abstractmethod
    def read(self, layout: Layout, parcel: Any) -> list[Tensor]:
        """Return the tensors, which are the caller's own.

        Raises:
            TransferError: their bytes will not arrive.
        """

    def end(self, reason: str) -> None:
        """Note that the sender is gone: no more notes will arrive. Messages that it has sent may still be read."""

    def drop(self, parcel: Any, then: Callable[[], None]) -> None:
        """Drop a message that will not be read. Must not block.

        then: called by any thread once the message's credit may go back.
        """
        then()
