"""Shared memory between a channel's two ends: segments of equal slots, one slot for each message.

Segments are anonymous files (memfd): the kernel frees them with the last process that uses them, however it ends. Only
pages that were written take memory. They are reused, because fresh pages cost ten times a copy. A segment begins with a
byte for each slot, which the sender sets before it uses the slot, and the receiver clears.
"""

import ctypes
import json
import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels.packing import Layout, tensor_over
from lp_pipe.connections.finalizer import add_finalizer
from lp_pipe.connections.fork_isolation import make_private_in_children

_FREE, _USED = b"\0", b"\1"


class Slot:
    """Memory for one message; keeps the tensors in it from one message to the next."""

    def __init__(self, mapping: mmap.mmap, index: int, offset: int, size: int) -> None:
        self._mapping = mapping
        self._index = index
        self._offset = offset
        self._size = size
        self._layout: Layout | None = None
        self._tensors: list[Tensor] = []

    def tensors(self, layout: Layout) -> list[Tensor]:
        if layout is not self._layout:
            memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
            places = zip(layout.offsets, layout.tensor_specs, strict=False)  # offsets ends with the size
            # Tensors made by an evaluation will be written by a training step, which inference tensors do not allow.
            with torch.inference_mode(False):
                self._tensors = [tensor_over(memory, self._offset + offset, spec) for offset, spec in places]
            self._layout = layout
        return self._tensors

    def free(self) -> None:
        """Free the slot, which the sender may use again."""
        self._mapping[self._index] = 0

    def in_place_buffer(self) -> Any:
        """Return a buffer over the slot, which is freed once neither the buffer nor a view of it is used."""
        buffer = (ctypes.c_char * self._size).from_buffer(self._mapping, self._offset)
        add_finalizer(buffer, self._free_in_owner, os.getpid())
        return buffer

    def _free_in_owner(self, owner_pid: int) -> None:
        if os.getpid() == owner_pid:  # a forked child (a data loader) drops views of memory that its parent uses
            self.free()


class Segment:
    """The sender's side of a segment; unmapped and closed with its last reference.

    first: the token of its first slot.
    is_in_place: whether the receiver keeps a slot while it uses the tensors.
    """

    def __init__(self, first: int, count: int, slot_bytes: int, *, is_in_place: bool) -> None:
        self.first = first
        self.slot_bytes = slot_bytes
        self.is_in_place = is_in_place
        self.is_announced = False
        self._count = count
        self._fd = os.memfd_create("lp_pipe-channel", os.MFD_CLOEXEC)
        add_finalizer(self, os.close, self._fd)
        os.ftruncate(self._fd, _flags_bytes(count) + count * slot_bytes)
        self._mapping, self._slots = _mapped(self._fd, count, slot_bytes)

    def take(self) -> int | None:
        """Take a free slot, the first one, which is the warmest; return its token, or None if all are used."""
        index = self._mapping.find(_FREE, 0, self._count)
        if index < 0:
            return None
        self._mapping[index] = 1
        return self.first + index

    @property
    def is_used(self) -> bool:
        return self._mapping.find(_USED, 0, self._count) >= 0

    def slot(self, token: int) -> Slot:
        return self._slots[token - self.first]

    def announcement(self, used: list[int]) -> bytes:
        """Return what lets the receiver open the segment.

        used: the first tokens of all segments that further messages may come in.
        """
        return announcement(self._fd, [self.first, self._count, self.slot_bytes, self.is_in_place, used])


class OpenSegments:
    """The receiver's side: the segments that further messages may come in."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[list[Slot], bool]] = {}  # by first token; whether they are used in place

    def open(self, announced: bytes) -> None:
        """Map one more segment.

        Raises:
            OSError: the sender is gone, or in another pid namespace.
        """
        descriptor, (first, count, slot_bytes, is_in_place, used) = opened(announced)
        try:
            mapping, slots = _mapped(descriptor, count, slot_bytes)
            if is_in_place:
                make_private_in_children(mapping, descriptor)
        finally:
            os.close(descriptor)
        self._slots[first] = slots, is_in_place
        self._slots = {first: slots for first, slots in self._slots.items() if first in used}

    def slot(self, token: int) -> tuple[Slot, bool]:
        """Return the slot, and whether it is used in place."""
        first = max(self._slots)
        if first > token:  # the slot is of an older segment
            first = max(first for first in self._slots if first <= token)
        slots, is_in_place = self._slots[first]
        return slots[token - first], is_in_place


def announcement(descriptor: int, about: Sequence[Any]) -> bytes:
    """Return where another process finds this process's file.

    The inode tells the file from one that another process with a reused pid has at this number.
    """
    return json.dumps([os.getpid(), descriptor, os.fstat(descriptor).st_ino, about]).encode()


def opened(announced: bytes) -> tuple[int, list[Any]]:
    """Open an announced file; return a descriptor of it, and `about`.

    Raises:
        OSError: the other process is gone, or in another pid namespace.
    """
    pid, number, inode, about = json.loads(bytes(announced))
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    if os.fstat(descriptor).st_ino != inode:
        os.close(descriptor)
        raise FileNotFoundError(f"process {pid} has ended")
    return descriptor, about


def _mapped(descriptor: int, count: int, slot_bytes: int) -> tuple[mmap.mmap, list[Slot]]:
    start = _flags_bytes(count)
    mapping = mmap.mmap(descriptor, start + count * slot_bytes)
    return mapping, [Slot(mapping, index, start + index * slot_bytes, slot_bytes) for index in range(count)]


def _flags_bytes(count: int) -> int:
    """Return whole pages, so that slots begin with one."""
    return -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
