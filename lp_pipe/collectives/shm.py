"""Collective operations among processes of one host, through shared memory.

Each rank has a file of numbers that only it writes, and the others read:

    the number of its call, the call's digest, what it shows    for even calls
    the same                                                    for odd calls: others may still read those before
    whether a rank sleeps until this one arrives
    whether the generation is over, and why; the text of its call, after a mismatch; its segments
    its subgroups; each has such a part of the file for itself

A rank arrives when it writes the call's number, and goes on when it has read this number of all others. It looks some
times, then lets other processes run, then sleeps until the late rank wakes it (futex).
"""

import ctypes
import json
import mmap
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels.kinds import is_shm_supported
from lp_pipe.channels.segments import announcement, opened
from lp_pipe.collectives.backend import Call, GenerationOver, mismatch_text, place_of_call
from lp_pipe.collectives.shared_memory import Parts, SharedMemoryBackend
from lp_pipe.collectives.shm_memory import OwnMemory, PeerMemory, segment_of, tensor_at
from lp_pipe.connections.finalizer import add_finalizer
from lp_pipe.errors import CollectiveMismatch
from lp_pipe.membership import Membership
from lp_pipe.telemetry import waits

# Numbers of 8 bytes, each in cache lines of its own. A line of a call: its number, its digest, what the rank shows.
_LINES = (0, 16)
_SLEEPS, _OVER, _TEXT_OF, _SEGMENTS, _SUBGROUPS = 32, 48, 64, 80, 96
_REASON_AT, _TEXT_AT, _ANNOUNCED_AT, _PART_BYTES = 4096, 8192, 12288, 32768
_PARTS = 128  # of the group and of its subgroups; only those that are used take memory
_TEXT_BYTES = 4000
_GOES_ON, _IS_OVER, _IS_MISMATCH = 0, 1, 2

_LOOKS = 60
_YIELD_S = 0.3e-3
_SLEEP_S = 0.02  # then look whether the generation is over
_TEXT_PATIENCE_S = 0.5
_MOST_PIECES = 1 << 16  # that are kept for the next call

_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1
_libc = ctypes.CDLL(None, use_errno=True)

# Other processors may reorder stores, and Python has no memory barriers.
is_shm_backend_supported = sys.platform == "linux" and is_shm_supported() and platform.machine() in ("x86_64", "AMD64")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_SLEEP = _Timespec(0, int(_SLEEP_S * 1e9))


class RankFile:
    """The file of one rank, mapped: the part of the whole group, or of a subgroup."""

    def __init__(self, mapping: mmap.mmap, part: int = 0) -> None:
        self._mapping = mapping
        self._start = part * _PART_BYTES
        self.numbers = memoryview(mapping)[self._start : self._start + _PART_BYTES].cast("q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapping, self._start))

    def part(self, number: int) -> "RankFile":
        """Return the part of a subgroup; `number` is at least 1."""
        return RankFile(self._mapping, number)

    def sleep_until_change(self, index: int, seen: int) -> None:
        """Sleep until `wake`, unless the number is not `seen` any more; at most for _SLEEP_S."""
        address = ctypes.c_void_p(self._address + 8 * index)
        low = ctypes.c_uint32(seen & 0xFFFFFFFF)
        _libc.syscall(_SYS_FUTEX, address, _FUTEX_WAIT, low, ctypes.byref(_SLEEP), None, 0)

    def wake(self, index: int) -> None:
        _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(self._address + 8 * index), _FUTEX_WAKE, 1 << 30, None, None, 0)

    def write(self, at: int, value: Any) -> None:
        data, at = json.dumps(value).encode(), self._start + at
        self._mapping[at : at + 8 + len(data)] = len(data).to_bytes(8, "little") + data

    def read(self, at: int) -> Any:
        at += self._start
        size = int.from_bytes(self._mapping[at : at + 8], "little")
        return json.loads(self._mapping[at + 8 : at + 8 + size])


class OwnRankFile(RankFile):
    """The file of this rank. announced: what lets the others open it."""

    def __init__(self) -> None:
        descriptor = os.memfd_create("lp_pipe-ranks", os.MFD_CLOEXEC)
        add_finalizer(self, os.close, descriptor)
        os.ftruncate(descriptor, _PARTS * _PART_BYTES)
        super().__init__(mmap.mmap(descriptor, _PARTS * _PART_BYTES))
        self.announced = announcement(descriptor, [])


def opened_rank_file(announced: bytes) -> RankFile:
    """Open another rank's file.

    Raises:
        OSError: its process is gone, or in another pid namespace.
    """
    descriptor, _ = opened(announced)
    try:
        return RankFile(mmap.mmap(descriptor, 0))
    finally:
        os.close(descriptor)


own_memory = OwnMemory()


class ShmBackend(SharedMemoryBackend):
    """A rank that is a process of the same host as all the others. files: of all ranks, in rank order."""

    def __init__(self, membership: Membership, files: Sequence[RankFile]) -> None:
        super().__init__(membership)
        self._files = list(files)
        self._own = files[self.rank]
        self._numbers = [file.numbers for file in files]
        self._others = [rank for rank in range(self.world_size) if rank != self.rank]
        self._memory = [own_memory if rank == self.rank else PeerMemory() for rank in range(self.world_size)]
        self._number = 0
        self._fence = threading.Lock()
        self._reason = ""
        self._cut: dict[Any, Sequence[Parts]] = {}
        self._cut_count = 0
        self._announced = 0
        self._subgroups = 0

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return own_memory.empty(numel, dtype)

    def subgroup(self, ranks: Sequence[int]) -> "ShmBackend":
        if self._subgroups == _PARTS - 1:
            raise ValueError(f"{self.membership.members[self.rank]} has {self._subgroups} subgroups already, the most")
        self._subgroups += 1
        digest = Call("subgroup", shape=tuple(ranks)).digest
        self._own.numbers[_SUBGROUPS + self._subgroups] = digest
        files = [self._files[rank].part(self._part_of(rank, digest)) for rank in ranks]
        return ShmBackend(self.membership.of_subgroup(ranks), files)

    def abort(self, reason: str) -> None:
        self._end(_IS_OVER, reason)

    def close(self) -> None:
        self._end(_IS_OVER, f"{self.membership.members[self.rank]} has left the group")

    def _end(self, how: int, reason: str) -> None:
        """Let no further call succeed, here and at the others."""
        with self._fence:
            if self._own.numbers[_OVER] == _GOES_ON:
                self._reason = reason
                self._own.write(_REASON_AT, reason[:_TEXT_BYTES])
                self._own.numbers[_OVER] = how
        for file in self._files:
            for line in _LINES:
                file.wake(line)

    def _part_of(self, rank: int, digest: int) -> int:
        """Wait until a rank has opened a subgroup; return the number of its part of the file."""
        numbers = self._numbers[rank]
        with waits.waiting(waits.RANKS, waits.Target(peer=self.membership.members[rank]), "subgroup"):
            while True:
                for part in range(1, _PARTS):
                    if numbers[_SUBGROUPS + part] == digest:
                        return part
                if numbers[_OVER] != _GOES_ON:
                    self._end(numbers[_OVER], self._files[rank].read(_REASON_AT))
                if self._reason:
                    self._raise_over()
                time.sleep(1e-3)

    def _arrive(self, call: Call, shown: int | None) -> Sequence[int]:
        if self._reason:
            self._raise_over()
        self._number = number = self._number + 1
        line, own, digest = _LINES[number & 1], self._own.numbers, call.digest
        own[line + 1], own[line + 2] = digest, -1 if shown is None else shown
        own[line] = number
        with self._fence:  # taking a lock orders the store before the load
            sleeps = own[_SLEEPS]
        if sleeps:
            own[_SLEEPS] = 0
            self._own.wake(line)
        for rank in self._others:
            if self._numbers[rank][line] != number:
                self._wait_for(rank, call)
        result = []
        for numbers in self._numbers:
            if numbers[line + 1] != digest:
                self._raise_mismatch(call)
            result.append(numbers[line + 2])
        return result

    def _wait_for(self, rank: int, call: Call) -> None:
        numbers, number = self._numbers[rank], self._number
        line = _LINES[number & 1]
        for _ in range(_LOOKS):
            if numbers[line] == number:
                return
        until = time.monotonic() + _YIELD_S
        while time.monotonic() < until:
            os.sched_yield()
            if numbers[line] == number:
                return
        with waits.waiting(waits.RANKS, waits.Target(peer=self.membership.members[rank]), str(call)):
            while (seen := numbers[line]) != number:
                numbers[_SLEEPS] = 1
                with self._fence:
                    is_here = numbers[line] != seen
                if not is_here:
                    self._files[rank].sleep_until_change(line, seen)
                if numbers[line] != number:
                    self._check(call)

    def _check(self, call: Call) -> None:
        """Raise if the ranks that are late will not come, or another one is in another call."""
        if self._reason:
            self._raise_over()
        line = _LINES[self._number & 1]
        if any(numbers[line] == self._number and numbers[line + 1] != call.digest for numbers in self._numbers):
            self._raise_mismatch(call)
        for rank in self._others:
            how = self._numbers[rank][_OVER]
            if how != _GOES_ON and self._numbers[rank][line] != self._number:
                self._end(how, self._files[rank].read(_REASON_AT))
                self._raise_over()

    def _raise_over(self) -> None:
        if self._own.numbers[_OVER] == _IS_MISMATCH:
            raise CollectiveMismatch(self._reason)
        raise GenerationOver(self._reason)

    def _raise_mismatch(self, call: Call) -> None:
        """Tell the others which call this rank is in and where, learn theirs, and raise."""
        line, number = _LINES[self._number & 1], self._number
        self._own.write(_TEXT_AT, [str(call)[: _TEXT_BYTES // 2], place_of_call()[: _TEXT_BYTES // 2]])
        self._own.numbers[_TEXT_OF] = number
        here = [rank for rank, numbers in enumerate(self._numbers) if numbers[line] == number]
        until = time.monotonic() + _TEXT_PATIENCE_S
        while any(self._numbers[rank][_TEXT_OF] != number for rank in here) and time.monotonic() < until:
            time.sleep(1e-3)
        calls = {
            rank: tuple(self._files[rank].read(_TEXT_AT)) for rank in here if self._numbers[rank][_TEXT_OF] == number
        }
        self._end(_IS_MISMATCH, mismatch_text(self.membership.members, calls))
        self._raise_over()

    def _share(self, flat: Tensor) -> tuple[Tensor, int]:
        place = own_memory.place_of(flat) if flat.numel() else 0
        if place is None:
            flat = own_memory.empty(len(flat), flat.dtype).copy_(flat)
            place = own_memory.place_of(flat)
            assert place is not None
        if self._announced < len(own_memory):
            announced = [one.decode() for one in own_memory.announcements()]
            self._own.write(_ANNOUNCED_AT, announced)
            self._announced = len(announced)
        return flat, place

    def _tensor(self, rank: int, shown: int, numel: int, dtype: torch.dtype) -> Tensor:
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        memory = self._memory[rank]
        if isinstance(memory, PeerMemory) and segment_of(shown) >= len(memory):
            try:
                memory.add([text.encode() for text in self._files[rank].read(_ANNOUNCED_AT)])
            except OSError as error:
                raise GenerationOver(f"{self.membership.members[rank]} has ended") from error
        return tensor_at(memory, shown, numel, dtype)

    def _pieces(self, shown: Sequence[int], numel: int, dtype: torch.dtype) -> Sequence[Parts]:
        key = (*shown, numel, dtype)
        pieces = self._cut.get(key)
        if pieces is None:
            pieces = self._cut[key] = super()._pieces(shown, numel, dtype)
            self._cut_count += len(pieces)
            if self._cut_count > _MOST_PIECES:
                self._cut, self._cut_count = {key: pieces}, len(pieces)
        return pieces
