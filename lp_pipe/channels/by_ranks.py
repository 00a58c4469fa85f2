"""Transport through a communicator of two ranks, whose backend is a parameter: gloo, or NCCL.

    sender (rank 0)                                     receiver (rank 1)
      copies, starts to send   ── header: token, size ─►  has its connection's thread start to receive
      the copy is free again   ◄─────── credit ───────  the stage asks for it, and waits for the bytes

The bytes travel while both stages compute, moved by the backend's own thread or stream.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from torch import Tensor

from lp_pipe.channels.arrivals import Awaited
from lp_pipe.channels.arriving import SIZE, ArrivingInlet
from lp_pipe.channels.note_store import LIMIT
from lp_pipe.channels.packing import Layout, tensor_over
from lp_pipe.channels.ranks import RECEIVER, SENDER, TAGS, Backend, Pair
from lp_pipe.channels.transport import Outlet, TransferError

_CLOSE_PATIENCE = timedelta(seconds=2)


class RankOutlet(Pair, Outlet):
    """Tokens count the messages; each is sent as one piece, laid out as in shared memory."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend, SENDER)
        self._next = 0
        self._sending: dict[int, tuple[Awaited, Tensor]] = {}

    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        token, size = self._next, layout.offsets[-1]
        if size:
            memory = self.backend.empty(size)
            for offset, spec, tensor in zip(layout.offsets, layout.tensor_specs, tensors, strict=False):
                tensor_over(memory, offset, spec).copy_(tensor)
            try:
                self._sending[token] = self.group().send([memory], RECEIVER, token % TAGS), memory
            except RuntimeError as error:
                raise TransferError(f"{self.backend.name}: {error}") from error
        self._next += 1
        return token, [SIZE.pack(size)]

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
        making = self._making
        super().close(reason)
        self._sending.clear()
        if _is_made(making):
            self.backend.close(making.result(), SENDER)


class RankInlet(Pair, ArrivingInlet):
    def __init__(self, backend: Backend) -> None:
        Pair.__init__(self, backend, RECEIVER)
        ArrivingInlet.__init__(self, backend.name, backend.device)

    def _start(self, token: int, size: int, header: Any) -> tuple[Awaited, Tensor]:
        with self.backend.receiving():
            memory = self.backend.empty(size)
            return self.group().recv([memory], SENDER, token % TAGS), memory

    def _tensors_in(self, memory: Tensor, layout: Layout) -> list[Tensor]:
        return self.backend.tensors_in(memory, layout)

    def end(self, reason: str) -> None:
        self._store.close(reason)
        if _is_made(self._making):
            ArrivingInlet.end(self, reason)
        else:
            self._fail(reason)

    def close(self, reason: str) -> None:
        making = self._making
        Pair.close(self, reason)
        ArrivingInlet.close(self, reason)
        if _is_made(making):
            self.backend.close(making.result(), RECEIVER)

    def _give_up(self, reason: str) -> None:
        super()._give_up(reason)
        if _is_made(self._making):
            self.backend.give_up(self._making.result())


def _is_made(making: "Future[Any]") -> bool:
    return making.done() and making.exception() is None


def arrives(work: Awaited, limit: timedelta = LIMIT) -> bool:
    """Wait for it; False where it failed: then the channel's connection says why."""
    try:
        work.wait(limit)
    except RuntimeError:
        return False
    return True
