"""The way of the tensors' bytes from a sender to its receiver: the only part of a channel that has several forms."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lp_pipe.channels.packing import Layout
from lp_pipe.connections.routes import LOOPBACK
from lp_pipe.errors import LpPipeError

Notify = Callable[[bytes], None]


class TransferError(LpPipeError):
    """The bytes will not come, or cannot go: the other end is gone, or this one is closing."""


class NoRoomError(LpPipeError, OSError):
    """There are no descriptors, or no memory, for this message. Nothing of it was written: others may follow."""


class TransportEnd:
    """What a transport's two halves have in common: they may exchange notes over the channel's connection.

    All are called by the connection's thread, or by whoever closes, and must not block for long.

    address: of this host, where a transport that makes connections of its own listens. has_tokens: whether each message
    has one, which comes back when it was received; else several are told at once.
    """

    address = LOOPBACK
    has_tokens = True

    def begin(self, notify: Notify) -> None:
        """Both ends are there; `notify` sends a note to the other half, which may come before its own `begin`.

        `notify` raises Unavailable once the connection is closed.
        """

    def on_note(self, note: bytes) -> None:
        """What the other half has said."""

    def close(self, reason: str) -> None:
        """This end is closed: whoever waits in here raises TransferError, and nothing is kept. Idempotent."""


class TransportSender(TransportEnd, ABC):
    """The sender's half. `write` is called by one thread at a time, `release` by the connection's thread."""

    @abstractmethod
    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        """Hand the tensors over; returns what goes with the message: a token, and the frame's buffers.

        layout: the same object as the last time when nothing has changed.
        credits: at most so many tokens are out at a time.

        Raises:
            TransferError: the channel was closed meanwhile.
            NoRoomError: this message cannot go; all is as it was before.
        """

    def release(self, token: int) -> None:
        """The message was received, or dropped; not said where both ends have a queue."""

    def finish(self) -> None:
        """Before an orderly closing: what was written still goes, unless the receiver takes too long."""


class TransportReceiver(TransportEnd, ABC):
    """The receiver's half."""

    @abstractmethod
    def accept(self, token: int, buffers: Sequence[Any]) -> Any:
        """Take what came with a message, without touching the bytes; returns the parcel for `read`.

        Called for every message, in order, by the connection's thread, which must not be held up.
        """

    @abstractmethod
    def read(self, layout: Layout, parcel: Any) -> list[Tensor]:
        """The tensors, owned by the caller.

        Raises:
            TransferError: their bytes do not come.
        """

    def end(self, reason: str) -> None:
        """The sender is gone: no more notes will come; what it has sent may still be read."""

    def drop(self, parcel: Any, then: Callable[[], None]) -> None:
        """Nobody will read it; `then` is called, by any thread, once its credit may go back. Does not block."""
        then()
