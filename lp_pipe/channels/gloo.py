"""Transport through torch.distributed: one pair of ranks for each channel, over gloo.

    sender (rank 0)                                     receiver (rank 1)
      copies, starts to send   ── header: token, size ─►  has its connection's thread start to receive
      the copy is free again   ◄─────── credit ───────  the stage asks for it, and waits for the bytes

The bytes travel while both stages compute, moved by gloo's own thread. The receive starts when the header is there and
not when the stage asks, so two stages that send to each other do not wait for each other.
"""

import struct
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lp_pipe.channels.arrivals import Arrival, Arrivals
from lp_pipe.channels.packing import Layout, TensorSpec, empty_tensor, separate_tensors, tensor_over
from lp_pipe.channels.ranks import RECEIVER, SENDER, TAGS, Pair, arrives, break_off
from lp_pipe.channels.transport import Inlet, Outlet, TransferError
from lp_pipe.connections.routes import is_loopback

_CLOSE_PATIENCE = timedelta(seconds=2)
_LAST_BYTES_S = {"near": 1.0, "far": 5.0}
_SIZE = struct.Struct("<Q")


class GlooOutlet(Pair, Outlet):
    """Tokens count the messages; each is sent as one piece, laid out as in shared memory."""

    rank = SENDER

    def __init__(self) -> None:
        super().__init__()
        self._next = 0
        self._sending: dict[int, tuple[dist.Work, Tensor]] = {}

    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        token, size = self._next, layout.offsets[-1]
        self._next += 1
        if size:
            memory = self._memory.empty(_bytes(size))
            for offset, spec, tensor in zip(layout.offsets, layout.tensor_specs, tensors, strict=False):
                tensor_over(memory, offset, spec).copy_(tensor)
            try:
                self._sending[token] = self.group().send([memory], RECEIVER, token % TAGS), memory
            except RuntimeError as error:
                raise TransferError(f"gloo: {error}") from error
        return token, [_SIZE.pack(size)]

    def release(self, token: int) -> None:
        sending = self._sending.pop(token, None)
        if sending is not None:
            arrives(sending[0], _CLOSE_PATIENCE)  # it has arrived, so this is a matter of microseconds

    def finish(self) -> None:
        for token in list(self._sending):
            sending = self._sending.pop(token, None)  # a work can be waited for once
            if sending is not None and not arrives(sending[0], _CLOSE_PATIENCE):
                return

    def close(self, reason: str) -> None:
        super().close(reason)
        self._sending.clear()


class GlooInlet(Pair, Inlet):
    rank = RECEIVER

    def __init__(self) -> None:
        super().__init__()
        self._arrivals = Arrivals()
        self._giving_up: threading.Timer | None = None

    def accept(self, token: int, buffers: Sequence[Any]) -> "Arrival | TransferError | None":
        (size,) = _SIZE.unpack(buffers[0])
        if not size:
            return None
        memory = self._memory.empty(_bytes(size))
        try:
            return self._arrivals.expect(self.group().recv([memory], SENDER, token % TAGS), memory)
        except TransferError as error:
            return error
        except RuntimeError as error:
            return TransferError(f"gloo: {error}")

    def read(self, layout: Layout, parcel: "Arrival | TransferError | None") -> list[Tensor]:
        if isinstance(parcel, TransferError):
            raise parcel
        if parcel is None:
            return [empty_tensor(spec) for spec in layout.tensor_specs]
        return separate_tensors(parcel.result(), layout)

    def drop(self, parcel: "Arrival | TransferError | None") -> None:
        """Its credit must not go back earlier than it has come."""
        if isinstance(parcel, Future):
            parcel.exception()

    def end(self, reason: str) -> None:
        """What was sent before an orderly end still comes; what a link that was cut has kept does not."""
        self._store.close(reason)
        if not _is_made(self._making):
            return
        patience_s = _LAST_BYTES_S["near" if is_loopback(self.address) else "far"]
        self._giving_up = threading.Timer(patience_s, self._arrivals.give_up, (reason,))
        self._giving_up.name, self._giving_up.daemon = "give up gloo", True
        self._giving_up.start()

    def close(self, reason: str) -> None:
        making = self._making
        super().close(reason)
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._arrivals.give_up(reason)
        if _is_made(making):
            break_off(making.result(), RECEIVER)


def _is_made(making: "Future[Any]") -> bool:
    return making.done() and making.exception() is None


def _bytes(size: int) -> TensorSpec:
    return TensorSpec(torch.uint8, (size,), (1,))
