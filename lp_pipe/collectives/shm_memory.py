"""Memory of this process that the other ranks of its host can map, and theirs as this process has mapped it.

Memory comes from segments, which are anonymous files (memfd): the kernel frees them with the last process that uses
them. A block whose tensors are all gone is used again, because fresh pages cost ten times a copy.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lp_pipe.channels.segments import announcement, opened
from lp_pipe.connections.finalizer import add_finalizer
from lp_pipe.connections.fork_isolation import make_private_in_children

_SEGMENT_BYTES = 256 << 20  # only pages that were written take memory
_BLOCK = 128  # bytes: two cache lines, which processors fetch together
_OFFSET_BITS = 44


class _SharedSegment(NamedTuple):
    descriptor: int
    mapping: mmap.mmap
    memory: Tensor
    address: int


class OwnMemory:
    """The memory that this process shares. Thread-safe. It outlives the generations of a group.

    A forked child begins with no segments: what it has inherited is private to it.
    """

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run in a thread that holds it
        self._segments: list[_SharedSegment] = []
        self._used = _SEGMENT_BYTES  # bytes of the last segment
        self._free: dict[int, list[int]] = {}  # places by size
        self._pid = os.getpid()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a new tensor in a segment.

        Raises:
            OSError: this host has no memory or descriptor for it.
        """
        size = -(-numel * dtype.itemsize // _BLOCK) * _BLOCK
        if not size:
            return torch.empty(0, dtype=dtype, device="cpu")
        with self._lock:
            free = self._free.get(size)
            place = free.pop() if free else self._new_place(size)
            segment = self._segments[place >> _OFFSET_BITS]
            buffer = (ctypes.c_char * size).from_buffer(segment.mapping, place & (1 << _OFFSET_BITS) - 1)
            add_finalizer(buffer, self._give_back, size, place, self._pid)
        return torch.frombuffer(buffer, dtype=dtype, count=numel)

    def place_of(self, tensor: Tensor) -> int | None:
        """Return the place of a tensor's memory as a number; None if it is not in a segment."""
        address = tensor.data_ptr()
        for number, segment in enumerate(self._segments):
            offset = address - segment.address
            if 0 <= offset < len(segment.memory):
                return number << _OFFSET_BITS | offset
        return None

    def announcements(self) -> list[bytes]:
        """Return what lets other processes open the segments."""
        return [announcement(segment.descriptor, []) for segment in self._segments]

    def memory(self, number: int) -> Tensor:
        """Return the bytes of a segment."""
        return self._segments[number].memory

    def __len__(self) -> int:
        return len(self._segments)

    def _new_place(self, size: int) -> int:
        if not self._segments or self._used + size > len(self._segments[-1].memory):
            self._add_segment(max(size, _SEGMENT_BYTES))
        place = (len(self._segments) - 1) << _OFFSET_BITS | self._used
        self._used += size
        return place

    def _add_segment(self, size: int) -> None:
        descriptor = os.memfd_create("lp_pipe-collectives", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            mapping = mmap.mmap(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        make_private_in_children(mapping, descriptor)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        add_finalizer(mapping, os.close, descriptor)
        self._segments.append(_SharedSegment(descriptor, mapping, memory, memory.data_ptr()))
        self._used = 0

    def _give_back(self, size: int, place: int, pid: int) -> None:
        if pid != self._pid:  # a forked child drops its copy of what its parent uses
            return
        with self._lock:
            self._free.setdefault(size, []).append(place)


class PeerMemory:
    """The segments of another process, mapped when they are first used."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    def add(self, announcements: Sequence[bytes]) -> None:
        """Map the segments that are announced beyond those that are mapped.

        Raises:
            OSError: the process is gone, or in another pid namespace.
        """
        for announced in announcements[len(self._memory) :]:
            descriptor, _ = opened(announced)
            try:
                mapping = mmap.mmap(descriptor, 0)
                make_private_in_children(mapping, descriptor)
            finally:
                os.close(descriptor)
            self._memory.append(torch.frombuffer(mapping, dtype=torch.uint8))

    def memory(self, number: int) -> Tensor:
        """Return the bytes of a segment."""
        return self._memory[number]

    def __len__(self) -> int:
        return len(self._memory)


def tensor_at(memory: "OwnMemory | PeerMemory", place: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the tensor at a place of `OwnMemory.place_of`."""
    start = place & (1 << _OFFSET_BITS) - 1
    return memory.memory(place >> _OFFSET_BITS)[start : start + numel * dtype.itemsize].view(dtype)


def segment_of(place: int) -> int:
    """Return the number of the segment of a place."""
    return place >> _OFFSET_BITS
