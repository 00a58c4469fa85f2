"""The way of the tensors' bytes from a sender to its receiver: the only part of a channel that has several forms."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lp_pipe.channels.packing import Layout


class Outlet(ABC):
    """The sender's half. `write` is called by one thread at a time, `release` by the connection's thread."""

    @abstractmethod
    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        """Hand the tensors over; returns what goes with the message: a token, and the frame's buffers.

        layout: the same object as the last time when nothing has changed.
        credits: at most so many tokens are out at a time.
        """

    def release(self, token: int) -> None:  # noqa: B027 (most have nothing to release)
        """The receiver does not need the token's bytes any more."""


class Inlet(ABC):
    """The receiver's half."""

    @abstractmethod
    def accept(self, token: int, buffers: Sequence[Any]) -> Any:
        """Take what came with a message, without touching the bytes; returns the parcel for `read`.

        Called for every message, in order, by the connection's thread, which must not be held up.
        """

    @abstractmethod
    def read(self, layout: Layout, parcel: Any) -> list[Tensor]:
        """The tensors, owned by the caller; the token's bytes are not needed any more."""
