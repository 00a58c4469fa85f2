"""Deal the optimizer's state of shards to the workers that need it now, from those that have it.

Shards move when workers come or go, and when parameters are frozen. Each worker tells which ranges of each parameter it
has. A range that two workers have comes from one of them:

    worker 0 has     [ 0 .. 3 )                  needs  [ 0 .. 5 )
    worker 2 has                [ 6 .. 9 )       needs            [ 5 .. 9 )
              mirrors     [ 3 .. 6 )             worker 1 is gone; its shard comes from worker 2, for both

No process ever has more than its own shards and one piece.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lp_pipe.collectives.backend import Call
from lp_pipe.data_parallel.workers import ReplicaWorkers
from lp_pipe.training.device import on_host
from lp_pipe.training.state_shards import OwnShard, OwnShardState, flat

STATE = Call("optimizer state of shards")
Ranges = Mapping[nn.Parameter, OwnShard]
States = dict[nn.Parameter, dict[str, Any]]


class OfElements:
    """Stands in a message for a tensor with an entry for each element of a shard."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def announced(state: OwnShardState) -> OwnShardState:
    """Return what other workers must know of a shard's state: dtypes in place of values of elements."""
    values = {
        name: OfElements(value.dtype) if state.is_of_elements(name) else on_host(value)
        for name, value in state.values.items()
    }
    return OwnShardState(state.begin, state.end, values)


@dataclass(frozen=True)
class HeldShards:
    """What a worker has, as it tells the others.

    layout: the names of the parameters in its buckets; None: it has nothing yet. by_parameter: ranges with their state.
    lacks_updates: whether it has the newest parameters in these ranges only.
    """

    layout: Sequence[str] | None
    by_parameter: Sequence[Sequence[OwnShardState]]
    lacks_updates: bool


class _SentRange(NamedTuple):
    """A range that one worker sends. number: of its shard there."""

    begin: int
    end: int
    rank: int
    number: int


def are_shards_lost(parameters: Sequence[nn.Parameter], told: Sequence[HeldShards]) -> bool:
    """Return whether no worker has some element's state."""
    return any(_pieces(parameter, told, index) is None for index, parameter in enumerate(parameters))


def _pieces(parameter: nn.Parameter, told: Sequence[HeldShards], index: int) -> list[_SentRange] | None:
    """Return pieces that are all of a parameter; None: some element's state is lost."""
    pieces: list[_SentRange] = []
    begin = 0
    while begin < parameter.numel():
        longest = max(
            (
                (shard.end, -rank, -number)
                for rank, one in enumerate(told)
                if one.layout is not None
                for number, shard in enumerate(one.by_parameter[index])
                if shard.begin <= begin < shard.end
            ),
            default=None,
        )
        if longest is None:
            return None
        pieces.append(_SentRange(begin, longest[0], -longest[1], -longest[2]))
        begin = longest[0]
    return pieces


@dataclass
class _Needed:
    """A range that this worker needs, with the state that has come."""

    begin: int
    end: int
    values: dict[str, Any] = field(default_factory=dict)

    def put(self, name: str, begin: int, piece: Tensor) -> None:
        first, last = max(begin, self.begin), min(begin + len(piece), self.end)
        if name not in self.values:
            self.values[name] = torch.empty(self.end - self.begin, dtype=piece.dtype, device=piece.device)
        self.values[name][first - self.begin : last - self.begin] = piece[first - begin : last - begin]


@torch.no_grad()
def dealt_states(
    workers: ReplicaWorkers,
    parameters: Sequence[nn.Parameter],
    told: Sequence[HeldShards],
    own: HeldShards,
    needed: Sequence[Ranges],
) -> list[States]:
    """Return the state of each of the needed ranges; all workers call this, with the same `told`.

    Parameters get their newest elements, if a worker lacks some. own: with the state itself.
    """
    found: list[States] = [{} for _ in needed]
    lacks_updates = any(one.lacks_updates for one in told)
    for index, parameter in enumerate(parameters):
        ranges = [_Needed(shards[parameter].begin, shards[parameter].end) for shards in needed]
        for piece in _pieces(parameter, told, index) or ():
            here = [one for one in ranges if one.begin < piece.end and piece.begin < one.end]
            is_own = piece.rank == workers.membership.rank
            source = own.by_parameter[index][piece.number] if is_own else None
            for name, value in sorted(told[piece.rank].by_parameter[index][piece.number].values.items()):
                if not isinstance(value, OfElements):
                    for one in here:
                        one.values[name] = copy.deepcopy(value)
                    continue
                values = None if source is None else source.values[name][piece.begin - source.begin :]
                sent = _sent(workers, piece, value.dtype, values, parameter.device)
                for one in here:
                    one.put(name, piece.begin, sent)
            if lacks_updates:
                newest = flat(parameter)[piece.begin : piece.end]
                newest.copy_(_sent(workers, piece, parameter.dtype, newest if is_own else None, parameter.device))
        for states, one in zip(found, ranges, strict=True):
            if one.values:
                states[parameter] = one.values
    return found


def _sent(
    workers: ReplicaWorkers, piece: _SentRange, dtype: torch.dtype, source: Tensor | None, device: torch.device
) -> Tensor:
    """Return a piece, as its worker has sent it to all."""
    size = piece.end - piece.begin
    found = torch.empty(size, dtype=dtype, device=device) if source is None else source[:size].to(device, copy=True)
    if workers.membership.world_size > 1:
        workers.backend.broadcast(found, piece.rank, call=STATE)
    return found
