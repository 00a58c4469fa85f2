"""The plan that needs least memory, whatever time it takes: whether any fits, and where to cut so that one does."""

from typing import NamedTuple

import numpy as np

from lp_pipe.pipeline.partitioning.cost import ASYNCHRONOUS, CostModel, Memory, Values, Waiting
from lp_pipe.pipeline.partitioning.search import Search, memory_needed
from lp_pipe.pipeline.partitioning.states import Floats, States
from lp_pipe.pipeline.partitioning.topology import Level

_MOST_WORK = 2e5  # stages that begin at one state, with one number of replicas: some seconds


class Thriftiest(NamedTuple):
    """bytes: of its fullest device. cuts: the states between its stages, with the first and the last."""

    bytes: float
    cuts: list[int]


def thriftiest(states: States, memory: Memory, devices: int, max_replicas: int) -> Thriftiest:
    """One that fits, without replicas where such a one does; else the one that needs least.

    For devices on one level. On nested levels not all numbers of replicas can be had, so that more may be needed; the
    same holds for models so large that to find the least would take minutes.
    """
    for most in sorted({1, max_replicas}):
        found = _Fewest(states, memory, memory.limit, devices, most)
        if found.plan is not None:
            return found.plan
    best = Thriftiest(float(_needed(states, memory, 0, states.count - 1, 1, 0)), [0, states.count - 1])
    for most in sorted({1, max_replicas}):
        best = _least(states, memory, devices, most, best)
    return best


def _least(states: States, memory: Memory, devices: int, max_replicas: int, best: Thriftiest) -> Thriftiest:
    """What needs less than the best that is known, if anything does."""
    least = 0.0  # whatever fits needs as much
    for attempt in range(int(max(6, _MOST_WORK / (states.count * max_replicas)))):
        if least >= best.bytes:
            return best
        # By halves, and before that once whether there is anything better, which there seldom is.
        limit = (least + best.bytes) / 2 if attempt else best.bytes
        limit = max(least, min(limit, float(np.nextafter(best.bytes, 0))))
        found = _Fewest(states, memory, limit, devices, max_replicas)
        if found.plan is not None:
            best = found.plan
        else:
            least = found.next_limit  # to allow less than that changes nothing
    return Thriftiest(least, best.cuts)


def least_bytes(states: States, levels: tuple[Level, ...], memory: Memory, max_replicas: int) -> float:
    """What the fullest device of the plan that needs least on nested levels needs; takes as long as to search plans."""
    return Search(states, levels, _Bytes("bytes"), max_replicas, memory, on_a_device=_bytes_on_a_device).seconds()


class _Bytes(CostModel):
    """A stage costs what its devices need, whatever its replicas, and boundaries nothing."""

    def stage(self, compute: Values, parameters: Values, replicas: Values, level: Level) -> Values:
        return compute

    def boundary(self, crossing: Values, replicas: Values, level: Level) -> Values:
        return 0.0 * crossing


def _bytes_on_a_device(states: States, memory: Memory | None, waiting: Waiting) -> Floats:
    assert memory is not None, "least_bytes has one"
    return np.where(states.within, memory_needed(states, memory, waiting), np.inf)


class _Fewest:
    """The plan within `limit` bytes on the fewest devices, from the last state on: best for all earlier stages.

    What a stage holds grows with the devices behind it, and with nothing else that lies behind. plan: None if there is
    none. next_limit: the smallest one above `limit` that would allow a stage that this one does not.
    """

    def __init__(self, states: States, memory: Memory, limit: float, devices: int, max_replicas: int) -> None:
        self._states = states
        self._memory = memory
        self._limit = limit
        self._devices = devices
        # Each replica of as many has one micro-batch of a step.
        enough = devices if memory.schedule in ASYNCHRONOUS else memory.microbatches
        self._most = min(max_replicas, devices, enough)
        self.next_limit = np.inf
        self._used = np.full(states.count, devices + 1)  # more than there are: no plan from there on
        self._used[-1] = 0
        self._ends = np.zeros(states.count, dtype=int)
        self._needs = np.zeros(states.count)
        for start in reversed(range(states.count - 1)):
            self._fill(start)
        self.plan = self._traced() if self._used[0] <= devices else None

    def _fill(self, start: int) -> None:
        later = np.flatnonzero(self._states.within[start] & (self._used < self._devices))
        for replicas in range(1, self._most + 1):
            ends = later[self._used[later] + replicas <= self._devices]
            if not len(ends):
                break
            needed = _needed(self._states, self._memory, start, ends, replicas, self._used[ends])
            too_much = needed > self._limit
            self.next_limit = min(self.next_limit, float(needed[too_much].min(initial=np.inf)))
            total = np.where(too_much, self._devices + 1, self._used[ends] + replicas)
            fewest = int(total.argmin())
            if total[fewest] < self._used[start]:
                self._used[start], self._ends[start], self._needs[start] = total[fewest], ends[fewest], needed[fewest]

    def _traced(self) -> Thriftiest:
        cuts = [0]
        while cuts[-1] != self._states.count - 1:
            cuts.append(int(self._ends[cuts[-1]]))
        return Thriftiest(float(self._needs[cuts[:-1]].max()), cuts)


def _needed(states: States, memory: Memory, start: int, ends: Values, replicas: int, devices_behind: Values) -> Values:
    """Bytes of a device of the stages between these states."""
    parameters = np.maximum(states.parameters[ends] - states.parameters[start], 0)
    activations = np.maximum(states.activations[ends] - states.activations[start], 0)
    return memory.needed(parameters, activations, states.crossing[start], memory.waiting_on(replicas, devices_behind))
