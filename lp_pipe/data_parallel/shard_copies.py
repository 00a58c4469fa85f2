"""Copies of shards as of some step, to which all workers go back when workers change (`mirror_every` above 1).

A worker has copies of its own shards and of those of the worker before it: parameters and optimizer state. Copies of a
step are of use once all workers have them. So the copies before stay until then.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.data_parallel.shard_moves import HeldShards
from lp_pipe.training.state_shards import OwnShard, OwnShardState, flat


@dataclass(frozen=True)
class _CopiedShard:
    """A shard's state, and the elements of the parameter."""

    state: OwnShardState
    elements: Tensor


@dataclass(frozen=True)
class _Copy:
    layout: Sequence[str]
    shards: Mapping[nn.Parameter, Sequence[_CopiedShard]]


class ShardCopies:
    """The copies that one worker has of an optimizer's shards, by step."""

    def __init__(self) -> None:
        self._by_step: dict[int, list[_Copy]] = {}  # the newest first

    @property
    def steps(self) -> set[int]:
        return set(self._by_step)

    def take(
        self,
        step: int,
        layout: Sequence[str],
        shards: Sequence[Mapping[nn.Parameter, OwnShard]],
        states: Sequence[Mapping[nn.Parameter, Mapping[str, Any]]],
    ) -> None:
        """Copy shards with their states as of a step; other copies of the step stay, too."""
        found: dict[nn.Parameter, list[_CopiedShard]] = {}
        for some, of_some in zip(shards, states, strict=True):
            for parameter, shard in some.items():
                values = copy.deepcopy(dict(of_some.get(parameter, {})))
                copied = _CopiedShard(OwnShardState(shard.begin, shard.end, values), shard.elements.detach().clone())
                found.setdefault(parameter, []).append(copied)
        self._by_step.setdefault(step, []).insert(0, _Copy(list(layout), found))

    def keep_only(self, step: int) -> None:
        """Forget all but the newest copy of a step."""
        self._by_step = {step: self._by_step[step][:1]}

    def forget(self) -> None:
        """Forget all copies."""
        self._by_step = {}

    @torch.no_grad()
    def put_back(self, step: int, parameters: Sequence[nn.Parameter]) -> HeldShards:
        """Give the parameters the elements that were copied, and return the shards with their state."""
        copies = self._by_step[step]
        held: list[list[OwnShardState]] = []
        for parameter in parameters:
            shards = [shard for one in copies for shard in one.shards.get(parameter, ())]
            for shard in shards:
                flat(parameter)[shard.state.begin : shard.state.end].copy_(shard.elements)
            held.append([shard.state for shard in shards])
        return HeldShards(copies[0].layout, held, lacks_updates=True)
