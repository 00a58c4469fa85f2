"""Search for the plan on the fewest devices that keeps to a limit of bytes or of seconds, on one level.

What a stage holds grows with the devices behind it, and with nothing else that lies behind; what it takes depends on
its own ends and replicas alone. So whatever comes before, the fewest devices are the best from any state on:

    fewest[s] = min over t, r of fewest[t] + r    where the stage s..t with r replicas keeps to the limit

To find the smallest limit that a plan keeps to, halve the limits between a bound and a known plan.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lp_pipe.pipeline.partitioning.cost import Memory, Waiting
from lp_pipe.pipeline.partitioning.dynamic_program import NestedStage
from lp_pipe.pipeline.partitioning.states import Floats, States

ATTEMPTS = 200  # more than chains take, which is a dozen or two
Ints = NDArray[np.int64]


class Pairs:
    """All numbers of replicas of a stage with those of the devices behind it, by their sum, `total`."""

    def __init__(self, devices: int, max_replicas: int) -> None:
        numbers = np.arange(1, max_replicas + 1)[:, None], np.arange(devices)[None, :]
        replicas, behind = (every.ravel() for every in np.broadcast_arrays(*numbers))
        by_total = np.argsort(replicas + behind, kind="stable")
        by_total = by_total[: np.count_nonzero(replicas + behind <= devices)]
        self.devices = devices
        self.max_replicas = max_replicas
        self.replicas: Ints = replicas[by_total]
        self.behind: Ints = behind[by_total]
        self.total: Ints = self.replicas + self.behind
        self.place = np.full((max_replicas, devices + 1), -1)  # of replicas - 1 and devices behind; -1: too many
        self.place[self.replicas - 1, self.behind] = np.arange(len(by_total))
        self.up_to: Ints = np.searchsorted(self.total, np.arange(devices + 1), side="right")  # how many, by total


class HeldByPair:
    """The micro-batches and versions that a replica holds, for each of the pairs."""

    def __init__(self, memory: Memory, pairs: Pairs) -> None:
        waiting = memory.waiting_on(pairs.replicas, pairs.behind)
        self._microbatches, self._versions, _ = np.broadcast_arrays(*waiting, pairs.total)

    def at(self, places: Ints) -> Waiting:
        """Return what replicas hold, by the places of some pairs in `Pairs`."""
        return Waiting(self._microbatches[places], self._versions[places])


class Demand(Protocol):
    """The bytes or seconds of stages, which are limited; more for later ends, and more with more devices behind."""

    pairs: Pairs
    sides: Floats  # by state and replicas - 1: of a side of that boundary
    least_before: Ints  # by state: devices that any plan worth finding has before it
    least_behind: Ints

    def stages(self, start: int, ends: Ints, places: Ints) -> Floats:
        """Return the demand of stages from one state to others, with those pairs; inf: there is no such stage."""
        ...

    def below(self, known: float) -> "Demand":
        """Return the same for a search of plans that demand less than one that is known."""
        ...


class ChainPlan(NamedTuple):
    """A plan: the states between its stages, with the first and the last, their replicas, and the most demanded.

    cuts is empty where there is none. next_limit: the smallest that would allow a stage that the limit does not.
    """

    cuts: list[int]
    replicas: list[int]
    most: float
    next_limit: float

    @property
    def parts(self) -> list[NestedStage]:
        """Return the plan's stages."""
        stages = zip(self.cuts[:-1], self.cuts[1:], self.replicas, strict=True)
        return [NestedStage(start, end, replicas, []) for start, end, replicas in stages]


def min_devices(states: States, demand: Demand, limit: float) -> ChainPlan:
    """Return the plan on the fewest devices that keeps to the limit in all stages and sides of boundaries."""
    return _Sweep(states, demand, limit).found()


def search_min_limit(
    states: States, demand: Demand, known: ChainPlan, least: float, attempts: int
) -> tuple[ChainPlan, float]:
    """Return the plan with the least demand, where one is known, and what no plan demands less than.

    The two are equal, unless the attempts were too few.
    """
    for attempt in range(attempts):
        if least >= known.most:
            break
        # Halve; but first ask whether any plan is better than the known one, which is seldom so.
        limit = (least + known.most) / 2 if attempt else known.most
        limit = max(least, min(limit, float(np.nextafter(known.most, 0))))
        found = min_devices(states, demand.below(known.most), limit)
        if found.cuts:
            known = found
        else:
            least = found.next_limit  # a smaller limit would allow the same stages
    return known, min(least, known.most)


class _Sweep:
    """A pass from the last state backwards."""

    def __init__(self, states: States, demand: Demand, limit: float) -> None:
        self._states = states
        self._demand = demand
        self._pairs = pairs = demand.pairs
        self._limit = limit
        self._allows = demand.sides <= limit
        self._next_limit = float(demand.sides[~self._allows].min(initial=np.inf))
        self._used = np.full(states.count, pairs.devices)  # all devices: there is no plan from there on
        self._most = np.zeros(states.count)
        self._ends = np.zeros(states.count, dtype=int)
        self._replicas = np.zeros(states.count, dtype=int)
        # By pair: of ends that are each within the next, the first one demands least.
        self._is_chain = states.is_chain
        self._first = np.full(len(pairs.total), states.count)
        self._enter(states.count - 1, 0)
        for start in reversed(range(states.count - 1)):
            self._fill(start)

    def _fill(self, start: int) -> None:
        ends, places = self._candidates(start)
        if not len(ends):
            return
        asks, total = self._demand.stages(start, ends, places), self._pairs.total[places]
        fits = asks <= self._limit
        least = int(total[fits].min(initial=self._pairs.devices + 1))
        self._next_limit = min(self._next_limit, float(asks[total < least].min(initial=np.inf)))
        if least > self._pairs.devices:
            return
        best = np.flatnonzero(fits & (total == least))
        replicas, until = self._pairs.replicas[places[best]], ends[best]
        sides = np.maximum(self._demand.sides[start, replicas - 1], self._demand.sides[until, replicas - 1])
        most = np.maximum(np.maximum(asks[best], sides), self._most[until])
        chosen = int(most.argmin())
        self._most[start], self._ends[start], self._replicas[start] = most[chosen], until[chosen], replicas[chosen]
        self._enter(start, least)

    def _candidates(self, start: int) -> tuple[Ints, Ints]:
        """Return ends of a stage from that state on that are worth a look, each with its pair."""
        demand, pairs = self._demand, self._pairs
        fewest = demand.least_behind[start]
        most = pairs.devices - demand.least_before[start]
        if most < fewest:
            return np.zeros(0, dtype=int), np.zeros(0, dtype=int)
        low, high = pairs.up_to[max(fewest - 1, 0)], pairs.up_to[most]
        if self._is_chain:
            ends = self._first[low:high]
            some = (ends < self._states.count) & self._allows[start, pairs.replicas[low:high] - 1]
            return ends[some], np.flatnonzero(some) + low
        later = np.flatnonzero(self._states.within[start] & (self._used < pairs.devices))
        places = pairs.place[:, self._used[later]]
        some = (low <= places) & (places < high) & self._allows[start][:, None] & self._allows[later].T
        return np.broadcast_to(later, some.shape)[some], places[some]

    def _enter(self, start: int, used: int) -> None:
        """Record that so many devices are enough from that state on."""
        self._used[start] = used
        places = self._pairs.place[self._allows[start], used]
        self._first[places[places >= 0]] = start

    def found(self) -> ChainPlan:
        """Return the plan from the first state on, if there is one."""
        if not self._ends[0]:
            return ChainPlan([], [], np.inf, self._next_limit)
        cuts = [0]
        while cuts[-1] != self._states.count - 1:
            cuts.append(int(self._ends[cuts[-1]]))
        replicas = [int(self._replicas[cut]) for cut in cuts[:-1]]
        return ChainPlan(cuts, replicas, float(self._most[0]), self._next_limit)
