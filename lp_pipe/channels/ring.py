"""Transport on one host, through slots of shared memory: one copy for large messages, two for small ones.

    small    copies into a free slot ──── header: token ─────────►  receiver copies out
             slot is free again      ◄─── credit: token ──────────
    large    copies into a free slot ──── header: token ─────────►  receiver uses the memory in place
             may send one more       ◄─── credit: token ──────────
             slot is free again      ◄─── with a later credit ────  the last tensor in it has gone

There are as many small slots as credits, so whoever has a credit finds a free one; a message that does not fit gets a
new segment with larger slots, and the old one goes when its last slot is released. Large slots are the receiver's for
as long as it likes (activations wait for their backward), and credits do not wait for them: when none is free there
is one more segment. That takes no more memory than the receiver's own copies would.
"""

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels.packing import Layout, empty_tensor, separate_tensors
from lp_pipe.channels.segments import OpenSegments, Segment, Slot
from lp_pipe.channels.transport import Inlet, Outlet

LEAST_LENT_BYTES = 1 << 18  # below, copying costs less than keeping count

_MIN_SLOT_BYTES = 1 << 16
_MIN_LENT_SLOTS = 4
_TOKEN = struct.Struct("<Q")


class RingOutlet(Outlet):
    """Tokens number the slots of all segments that there ever were."""

    def __init__(self) -> None:
        self._small: list[Segment] = []  # one at most
        self._large: list[Segment] = []  # with slots of the same size
        self._busy: dict[int, Segment] = {}
        self._next_token = 0

    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        segment = self._free_segment(layout.offsets[-1], credits)
        token = segment.free.pop()
        for target, tensor in zip(segment.slot(token).tensors(layout), tensors, strict=True):
            target.copy_(tensor)
        self._busy[token] = segment
        if segment.is_announced:
            return token, []
        segment.is_announced = True
        return token, [segment.announcement([used.first for used in (*self._small, *self._large)])]

    def release(self, token: int, freed: bytes) -> None:
        if not self._busy[token].is_lent:
            self._free(token)
        for (freed_token,) in _TOKEN.iter_unpack(freed):
            self._free(freed_token)

    def _free(self, token: int) -> None:
        self._busy.pop(token).free.append(token)

    def _free_segment(self, size: int, credits: int) -> Segment:
        """One that has a free slot of that size."""
        is_large = size >= LEAST_LENT_BYTES
        segments = self._large if is_large else self._small
        if segments and segments[0].slot_bytes < size:
            segments.clear()
        fitting = next((segment for segment in segments if segment.free), None)
        if fitting is None:
            slot_bytes = segments[0].slot_bytes if segments else max(_MIN_SLOT_BYTES, 1 << (size - 1).bit_length())
            count = max(credits, _MIN_LENT_SLOTS) if is_large else credits
            fitting = Segment(self._next_token, count, slot_bytes, is_lent=is_large)
            self._next_token += count
            segments.append(fitting)
        return fitting


class RingInlet(Inlet):
    def __init__(self) -> None:
        self._segments = OpenSegments()
        self._freed: deque[int] = deque()  # the collector may add to it anywhere, so it must need no lock

    def accept(self, token: int, buffers: Sequence[Any]) -> Any:
        if buffers:
            self._segments.open(buffers[0])
        slot, is_lent = self._segments.slot(token)
        return slot.lent(partial(self._freed.append, token)) if is_lent else slot

    def read(self, layout: Layout, parcel: Any) -> list[Tensor]:
        if not isinstance(parcel, Slot):
            return separate_tensors(torch.frombuffer(parcel, dtype=torch.uint8), layout)
        pairs = zip(layout.tensor_specs, parcel.tensors(layout), strict=True)
        return [empty_tensor(spec).copy_(source) for spec, source in pairs]

    def freed(self) -> bytes:
        return b"".join(map(_TOKEN.pack, self._take_freed())) if self._freed else b""

    def _take_freed(self) -> Iterator[int]:
        while True:
            try:
                yield self._freed.popleft()
            except IndexError:
                return
