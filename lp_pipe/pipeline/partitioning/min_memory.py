"""Search for the plan that needs least memory: whether any plan fits, and where to cut so that one does."""

import numpy as np

from lp_pipe.pipeline.partitioning.cost import ASYNCHRONOUS, CostModel, Memory, Values, Waiting, bytes_on_device
from lp_pipe.pipeline.partitioning.dynamic_program import DynamicProgram, memory_needed
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

_MOST_WORK = 2e5  # stages that begin at one state, with one number of replicas: some seconds


def min_memory(states: States, memory: Memory, devices: int, max_replicas: int) -> ChainPlan:
    """Return a plan that fits, if possible without replicas; else the one that needs least. Its bytes are `most`.

    For devices on one level. On nested levels not all numbers of replicas can be had, so that more may be needed; the
    same holds for models so large that to find the least would take minutes.
    """
    one_stage = float(_BytesNeeded(states, memory, 1, 1).stages(0, np.array([states.count - 1]), np.array([0]))[0])
    best = ChainPlan([0, states.count - 1], [1], one_stage, np.inf)
    for most in sorted({1, max_replicas}):
        found = min_devices(states, _BytesNeeded(states, memory, devices, most), memory.limit)
        if found.cuts:
            return found
    for most in sorted({1, max_replicas}):
        attempts = ATTEMPTS if states.is_chain else int(max(6, _MOST_WORK / (states.count * most)))
        best, least = search_min_limit(states, _BytesNeeded(states, memory, devices, most), best, 0.0, attempts)
    return best._replace(most=least)


def nested_min_memory(states: States, levels: tuple[Level, ...], memory: Memory, max_replicas: int) -> float:
    """Return the bytes of the fullest device of the plan that needs least on nested levels.

    Takes as long as a search of plans.
    """
    return DynamicProgram(
        states, levels, _BytesModel("bytes"), max_replicas, memory, on_a_device=_bytes_on_a_device
    ).seconds()


class _BytesModel(CostModel):
    """A cost model in which a stage costs what its devices need, whatever its replicas, and boundaries nothing."""

    def stage(self, compute: Values, parameters: Values, replicas: Values, level: Level) -> Values:
        return compute

    def boundary(self, crossing: Values, replicas: Values, level: Level) -> Values:
        return 0.0 * crossing


def _bytes_on_a_device(states: States, memory: Memory | None, waiting: Waiting) -> Floats:
    assert memory is not None, "nested_min_memory has one"
    return np.where(states.within, memory_needed(states, memory, waiting), np.inf)


class _BytesNeeded:
    """The demand of bytes: those of the fullest device of a stage. A side of a boundary needs nothing."""

    def __init__(self, states: States, memory: Memory, devices: int, max_replicas: int) -> None:
        # With more replicas than micro-batches some would have none.
        enough = devices if memory.schedule in ASYNCHRONOUS else memory.microbatches
        self._states = states
        self._memory = memory
        self.pairs = Pairs(devices, min(max_replicas, devices, enough))
        self._held = HeldByPair(memory, self.pairs)
        self.sides = np.zeros((states.count, self.pairs.max_replicas))
        self.least_before = self.least_behind = np.zeros(states.count, dtype=int)

    def stages(self, start: int, ends: Ints, places: Ints) -> Floats:
        return bytes_on_device(self._states, self._memory, start, ends, self._held.at(places))

    def below(self, known: float) -> Demand:
        return self
