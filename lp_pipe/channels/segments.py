"""Shared memory between a channel's two ends: segments of equal slots, one for each message.

Segments are anonymous files (memfd): the kernel frees them with the last process that uses them, however it ends.
Only pages that were written to take memory, and they are used over and over, because fresh ones cost ten times a copy.
"""

import ctypes
import json
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels.packing import Layout, tensor_over


class Slot:
    """Memory for one message; keeps the tensors that lie in it from one message to the next."""

    def __init__(self, mapping: mmap.mmap, offset: int, size: int) -> None:
        self._mapping = mapping
        self._offset = offset
        self._size = size
        self._layout: Layout | None = None
        self._tensors: list[Tensor] = []

    def tensors(self, layout: Layout) -> list[Tensor]:
        if layout is not self._layout:
            memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
            places = zip(layout.offsets, layout.tensor_specs, strict=False)  # offsets ends with the size
            # Made by an evaluation, they will be written by a training step, which inference tensors do not allow.
            with torch.inference_mode(False):
                self._tensors = [tensor_over(memory, self._offset + offset, spec) for offset, spec in places]
            self._layout = layout
        return self._tensors

    def lent(self, when_unused: Callable[[], object]) -> Any:
        """A buffer over the slot; `when_unused` is called, anywhere, once neither it nor a view of it is used."""
        loan = (ctypes.c_char * self._size).from_buffer(self._mapping, self._offset)
        weakref.finalize(loan, when_unused).atexit = False
        return loan


class Segment:
    """The sender's side; unmapped and closed when the last reference goes.

    first: its slots' tokens count from here. is_lent: whether the receiver keeps a slot while it uses the tensors.
    """

    def __init__(self, first: int, count: int, slot_bytes: int, *, is_lent: bool) -> None:
        self.first = first
        self.slot_bytes = slot_bytes
        self.is_lent = is_lent
        self.free = list(range(first, first + count))  # last in, first out: the warmest slot is used next
        self.is_announced = False
        self._count = count
        self._fd = os.memfd_create("lp_pipe-channel", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, count * slot_bytes)
        self._slots = _slots_of(self._fd, count, slot_bytes)

    def slot(self, token: int) -> Slot:
        return self._slots[token - self.first]

    def announcement(self, used: list[int]) -> bytes:
        """Where the receiver finds the segment; the inode tells it from what a reused pid may have at that number.

        used: the first tokens of all segments that further messages may come in.
        """
        inode = os.fstat(self._fd).st_ino
        where = [os.getpid(), self._fd, inode]
        return json.dumps([where, self.first, self._count, self.slot_bytes, self.is_lent, used]).encode()


class OpenSegments:
    """The receiver's side: the segments that further messages may come in."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[list[Slot], bool]] = {}  # by first token; whether they are lent

    def open(self, announcement: bytes) -> None:
        """Map one more segment.

        Raises:
            OSError: the sender is gone, or lives where this process cannot see it (another pid namespace).
        """
        (pid, number, inode), first, count, slot_bytes, is_lent, used = json.loads(bytes(announcement))
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        try:
            if os.fstat(fd).st_ino != inode:
                raise FileNotFoundError(f"process {pid} has ended")
            self._slots[first] = _slots_of(fd, count, slot_bytes), is_lent
        finally:
            os.close(fd)
        self._slots = {first: slots for first, slots in self._slots.items() if first in used}

    def slot(self, token: int) -> tuple[Slot, bool]:
        """The slot, and whether it is lent."""
        first = max(first for first in self._slots if first <= token)
        slots, is_lent = self._slots[first]
        return slots[token - first], is_lent


def _slots_of(fd: int, count: int, slot_bytes: int) -> list[Slot]:
    mapping = mmap.mmap(fd, count * slot_bytes)
    return [Slot(mapping, index * slot_bytes, slot_bytes) for index in range(count)]
