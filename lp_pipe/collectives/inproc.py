"""Collective operations among threads of one process: ranks read and write each other's tensors."""

import sys
import threading
import weakref
from collections.abc import Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lp_pipe.collectives.backend import Call, GenerationOver, mismatch_text, place_of_call
from lp_pipe.collectives.shared_memory import SharedMemoryBackend
from lp_pipe.errors import CollectiveMismatch
from lp_pipe.membership import Membership
from lp_pipe.telemetry import waits

_LOOK_S = 1.0  # how often a wait is told which rank is late


class _Arrival(NamedTuple):
    number: int
    call: Call
    shown: Any
    thread: int


class _Room:
    """The place of one generation where its ranks wait for each other."""

    def __init__(self, membership: Membership) -> None:
        self._members = membership.members
        self._changed = threading.Condition()
        # Of two calls: a rank that leaves a call may arrive at the next one before the others have looked.
        self._arrivals: list[list[_Arrival | None]] = [[None] * membership.world_size for _ in range(2)]
        self._complete = -1  # the last call in which all have arrived
        self._mismatch = ""
        self._over = ""

    def arrive(self, rank: int, arrival: _Arrival) -> list[Any]:
        arrivals, number = self._arrivals[arrival.number & 1], arrival.number
        with self._changed:
            self._check()
            arrivals[rank] = arrival
            here = {other: one for other, one in enumerate(arrivals) if one is not None and one.number == number}
            if any(one.call != arrival.call for one in here.values()):
                self._mismatch = self._describe(here)
                self._changed.notify_all()
            elif len(here) == len(arrivals):
                self._complete = number
                self._changed.notify_all()
            target = waits.Target()
            with waits.waiting(waits.RANKS, target, str(arrival.call)):
                while self._complete < number:
                    self._check()
                    late = (rank for rank, one in enumerate(arrivals) if one is None or one.number != number)
                    target.peer = self._members[next(late)]
                    self._changed.wait(_LOOK_S)
            return [one.shown for one in arrivals if one is not None]

    def abort(self, reason: str) -> None:
        with self._changed:
            self._over = self._over or reason
            self._changed.notify_all()

    def _check(self) -> None:
        if self._mismatch:
            raise CollectiveMismatch(self._mismatch)
        if self._over:
            raise GenerationOver(self._over)

    def _describe(self, here: "dict[int, _Arrival]") -> str:
        frames = sys._current_frames()
        places = {
            rank: place_of_call() if one.thread == get_ident() else waits.place_of(frames.get(one.thread))
            for rank, one in here.items()
        }
        return mismatch_text(self._members, {rank: (str(one.call), places[rank]) for rank, one in here.items()})


_rooms: "weakref.WeakValueDictionary[tuple[bytes, ...], _Room]" = weakref.WeakValueDictionary()
_rooms_lock = threading.Lock()


class InprocBackend(SharedMemoryBackend):
    """A rank that is a thread. The members' endpoints, which differ between generations, name the generation."""

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        self._number = 0
        with _rooms_lock:
            self._room = _rooms.get(membership.endpoints) or _Room(membership)
            _rooms[membership.endpoints] = self._room

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")

    def subgroup(self, ranks: Sequence[int]) -> "InprocBackend":
        return InprocBackend(self.membership.of_subgroup(ranks))

    def abort(self, reason: str) -> None:
        self._room.abort(reason)

    def close(self) -> None:
        self._room.abort(f"{self.membership.members[self.rank]} has left the group")

    def _arrive(self, call: Call, shown: Any) -> Sequence[Any]:
        self._number += 1
        return self._room.arrive(self.rank, _Arrival(self._number, call, shown, get_ident()))

    def _share(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        on_host = flat.cpu()  # other ranks may use another GPU, or another stream of this one
        return on_host, on_host

    def _tensor(self, rank: int, shown: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return shown
