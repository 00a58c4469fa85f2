"""Transport on one host: slots of shared memory that are used over and over, because fresh pages are slow.

    sender   copies into a free slot ──── header: token ────►  receiver copies out
             slot is free again      ◄─── credit: token ─────

The sender makes a segment of as many slots as there are credits, so whoever has a credit finds a free slot. A message
that does not fit gets a new segment with larger slots; the old one goes when its last slot is released. Segments are
anonymous files (memfd): the kernel frees them with the last process that uses them, however it ends.
"""

import json
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels.packing import Layout, tensor_over
from lp_pipe.channels.recycler import Recycler
from lp_pipe.channels.transport import Inlet, Outlet

_MIN_SLOT_BYTES = 1 << 16


class RingOutlet(Outlet):
    """Tokens number the slots of all segments that there ever were: those of segment k are k·credits and on."""

    def __init__(self) -> None:
        self._segment: _Segment | None = None
        self._busy: dict[int, _Segment] = {}

    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        segment = self._fitting_segment(layout.offsets[-1], credits)
        token = segment.free.pop()
        for target, tensor in zip(segment.slot(token).tensors(layout), tensors, strict=True):
            target.copy_(tensor)
        self._busy[token] = segment
        announcement = [] if segment.is_announced else [segment.announcement()]
        segment.is_announced = True
        return token, announcement

    def release(self, token: int, freed: bytes) -> None:
        self._busy.pop(token).free.append(token)

    def _fitting_segment(self, size: int, credits: int) -> "_Segment":
        if self._segment is None or self._segment.slot_bytes < size:
            slot_bytes = max(_MIN_SLOT_BYTES, 1 << (size - 1).bit_length())
            first = 0 if self._segment is None else self._segment.first + credits
            self._segment = _Segment(first, credits, slot_bytes)
        return self._segment


class RingInlet(Inlet):
    def __init__(self) -> None:
        self._first = 0
        self._slots: list[_Slot] = []
        self._memory = Recycler()

    def accept(self, token: int, buffers: Sequence[Any]) -> Any:
        if buffers:
            self._first, self._slots = _open_segment(buffers[0])
        return self._slots[token - self._first]

    def read(self, layout: Layout, parcel: Any) -> list[Tensor]:
        pairs = zip(layout.tensor_specs, parcel.tensors(layout), strict=True)
        return [self._memory.empty(spec).copy_(source) for spec, source in pairs]


class _Slot:
    """Memory for one message; keeps the tensors that lie in it from one message to the next."""

    def __init__(self, memory: Tensor, offset: int) -> None:
        self._memory = memory
        self._offset = offset
        self._layout: Layout | None = None
        self._tensors: list[Tensor] = []

    def tensors(self, layout: Layout) -> list[Tensor]:
        if layout is not self._layout:
            places = zip(layout.offsets, layout.tensor_specs, strict=False)  # offsets ends with the size
            # Made by an evaluation, they will be written by a training step, which inference tensors do not allow.
            with torch.inference_mode(False):
                self._tensors = [tensor_over(self._memory, self._offset + offset, spec) for offset, spec in places]
            self._layout = layout
        return self._tensors


class _Segment:
    """The sender's side of the shared memory; unmapped and closed when the last reference goes."""

    def __init__(self, first: int, count: int, slot_bytes: int) -> None:
        self.first = first
        self.slot_bytes = slot_bytes
        self.free = list(range(first, first + count))  # last in, first out: the warmest slot is used next
        self.is_announced = False
        self._fd = os.memfd_create("lp_pipe-channel", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, count * slot_bytes)
        self._slots = _slots_of(self._fd, count, slot_bytes)

    def slot(self, token: int) -> _Slot:
        return self._slots[token - self.first]

    def announcement(self) -> bytes:
        """Where the receiver finds the segment; the inode tells it from what a reused pid may have at that number."""
        inode = os.fstat(self._fd).st_ino
        return json.dumps([os.getpid(), self._fd, inode, self.first, len(self._slots), self.slot_bytes]).encode()


def _open_segment(announcement: bytes) -> tuple[int, list[_Slot]]:
    """The receiver's side.

    Raises:
        OSError: the sender is gone, or lives where this process cannot see it (another pid namespace).
    """
    pid, number, inode, first, count, slot_bytes = json.loads(bytes(announcement))
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    try:
        if os.fstat(fd).st_ino != inode:
            raise FileNotFoundError(f"process {pid} has ended")
        return first, _slots_of(fd, count, slot_bytes)
    finally:
        os.close(fd)


def _slots_of(fd: int, count: int, slot_bytes: int) -> list[_Slot]:
    memory = torch.frombuffer(mmap.mmap(fd, count * slot_bytes), dtype=torch.uint8)
    return [_Slot(memory, index * slot_bytes) for index in range(count)]
