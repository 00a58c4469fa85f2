"""Search for the fastest plan of a chain on one level within a limited memory.

The slowest stage or side of the fastest plan takes least. Whether a plan is as fast as some time is a question
for `min_devices`: for all cuts of a thousand layers, and all replicas on 64 devices, it takes some hundredths of a
second. So the time between what no plan beats and what a known plan takes is halved until nothing lies between.
"""

import sys

import numpy as np

from lp_pipe.pipeline.partitioning.cost import CostModel, Memory, between, seconds_on_device
from lp_pipe.pipeline.partitioning.min_devices import (
    ATTEMPTS,
    ChainPlan,
    Demand,
    HeldByPair,
    Ints,
    Pairs,
    min_devices,
    search_min_limit,
)
from lp_pipe.pipeline.partitioning.states import Floats, States
from lp_pipe.pipeline.partitioning.topology import Level

_ANY = sys.float_info.max  # seconds: whatever it takes
_ROUNDING = 1e-6


def min_time(states: States, level: Level, model: CostModel, memory: Memory, max_replicas: int) -> ChainPlan:
    """Return the best plan, with its seconds as `most`; without cuts where none fits the memory."""
    demand = StageSeconds(states, level, model, memory, max_replicas)
    known = min_devices(states, demand, _ANY)
    if not known.cuts:
        return known
    least = float(states.compute[-1]) / level.count
    return search_min_limit(states, demand, known, least, ATTEMPTS)[0]


class StageSeconds:
    """The demand of seconds: what stages and sides of boundaries take.

    below: plans that take longer are left out.
    """

    def __init__(self, states: States, level: Level, model: CostModel, memory: Memory, max_replicas: int) -> None:
        self._states = states
        self._level = level
        self._model = model
        self._memory = memory
        self.pairs = Pairs(level.count, min(max_replicas, level.count))
        self._held = HeldByPair(memory, self.pairs)
        replicas = np.arange(1, self.pairs.max_replicas + 1)
        self.sides: Floats = model.boundary(states.crossing[:, None], replicas, level)
        self._leave_out(_ANY)

    def stages(self, start: int, ends: Ints, places: Ints) -> Floats:
        """Return the seconds of stages; inf where they do not fit."""
        parameters = between(self._states.parameters, start, ends)
        compute = seconds_on_device(self._states, self._memory, start, ends, self._held.at(places))
        seconds: Floats = self._model.stage(compute, parameters, self.pairs.replicas[places], self._level)
        return seconds

    def below(self, known: float) -> Demand:
        """Leave out plans that take longer: a device has no more to compute, so that more devices are needed."""
        self._leave_out(known)
        return self

    def _leave_out(self, known: float) -> None:
        of_device, compute = max(known, np.finfo(np.float64).tiny), self._states.compute
        self.least_before: Ints = np.ceil(compute / of_device - _ROUNDING).astype(int)
        self.least_behind: Ints = np.ceil((compute[-1] - compute) / of_device - _ROUNDING).astype(int)
