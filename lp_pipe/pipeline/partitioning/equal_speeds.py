"""Search on devices of equal speed, on nested levels."""

import sys
from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from lp_pipe.pipeline.partitioning.bounded_search import BoundedPlan, fastest_found, lower_bound
from lp_pipe.pipeline.partitioning.cost import UNLIMITED, CostModel, Memory, between, seconds_on_device
from lp_pipe.pipeline.partitioning.dynamic_program import DynamicProgram, NestedStage
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
from lp_pipe.pipeline.partitioning.nested_levels import NestedLevels
from lp_pipe.pipeline.partitioning.profile import Profile
from lp_pipe.pipeline.partitioning.states import Floats, States
from lp_pipe.pipeline.partitioning.timed_stages import TimedStage, recomputed, timed_stages
from lp_pipe.pipeline.partitioning.topology import Level

WINDOWED_STATES = 200  # with more states a plan is searched first that bounds the search of tables
_ROUNDING = 1 + 1e-9


class EqualSpeeds:
    """The search on all devices of the levels."""

    def __init__(self, levels: tuple[Level, ...], model: CostModel, recompute: str) -> None:
        self._levels = levels
        self._model = model
        self._recompute = recompute

    @property
    def inexact(self) -> str:
        """Return why not all that the devices allow is searched; empty where it is."""
        return ""

    def affordable(self, states: int, most: int, max_replicas: int, memory: Memory | None) -> int | None:
        """Return how many states, of `most` each within the next, can be searched in seconds; None: all `states`."""
        count = affordable(states, most, self._levels, memory)
        if count is None or len(self._levels) > 1:
            return count
        return None if states == most else most  # chains can be searched whole, by `min_time`

    def acceptable_gap(self, memory: Memory | None) -> float:
        """Return the gap of plans that are good enough where a search of all takes too long."""
        return 0.01

    def is_as_fast_within_memory(self, states: States, max_replicas: int) -> bool:
        """Return whether a search within a memory limit takes no longer than one without."""
        return len(self._levels) > 1 and self.affordable(states.count, states.count, max_replicas, None) is not None

    def searched(self, states: States, max_replicas: int, memory: Memory | None) -> list[TimedStage] | None:
        """Return the best stages between these states; None: none fit the memory."""
        parts = self._parts(states, max_replicas, memory)
        if not parts:
            return None
        return self._timed(parts, states, memory)

    def of_all_cuts(
        self, states: States, max_replicas: int, memory: Memory | None, least: Callable[[], float]
    ) -> BoundedPlan | None:
        """Return a fast plan between all of these states, which are each within the next; None: none is found.

        least: computes the seconds that no plan beats.
        """
        if len(self._levels) == 1:
            return None
        search = NestedLevels(states, self._levels, self._model, memory, max_replicas)
        return fastest_found(search.within, lambda parts: self._timed(parts, states, memory), least())

    def _timed(self, parts: list[NestedStage], states: States, memory: Memory | None) -> list[TimedStage]:
        again = recomputed(parts, states, memory, self._recompute)
        stages = timed_stages(parts, states, self._levels, self._model, again)
        return [stage._replace(hosts=hosts) for stage, hosts in zip(stages, hosts_of(parts, self._levels), strict=True)]

    def _parts(self, states: States, max_replicas: int, memory: Memory | None) -> list[NestedStage]:
        levels, model = self._levels, self._model
        is_long = affordable(states.count, states.count, levels, memory) is not None
        if len(levels) == 1 and states.is_chain and (memory is not None or is_long):
            return min_time(states, levels[0], model, memory or UNLIMITED, max_replicas).parts
        upper = self._upper(states, levels, max_replicas) if memory is None and len(levels) == 1 else np.inf
        search = DynamicProgram(states, levels, model, max_replicas, memory, upper)
        return search.parts() if np.isfinite(search.seconds()) else []

    def lower_bound(self, states: States, profile: Profile, max_replicas: int, memory: Memory | None) -> float:
        """Return seconds that no plan beats, where not all cuts could be searched."""
        level = _flat(self._levels)
        compute = float(states.compute[-1])
        bound = lower_bound(compute, [1.0] * level.count, level, self._model, max_replicas, profile)
        if states.is_complete and states.is_chain and memory is not None:
            bound = max(bound, min_time(states, _flat(self._levels), self._model, memory, max_replicas).most)
        elif states.is_complete:
            one_level = (_flat(self._levels),)
            upper = self._upper(states, one_level, max_replicas)
            search = DynamicProgram(states, one_level, self._model, max_replicas, upper=upper)
            bound = max(bound, search.seconds())
        return bound

    def _upper(self, states: States, levels: tuple[Level, ...], max_replicas: int) -> float:
        """Return the seconds of a plan that is found fast: without replicas, and with few places to cut."""
        if states.count <= WINDOWED_STATES:
            return np.inf
        straight = DynamicProgram(states, levels, self._model, 1).seconds() * _ROUNDING
        if max_replicas == 1:
            return straight
        few = states.only(evenly(states.count, WINDOWED_STATES))
        return min(
            straight, DynamicProgram(few, levels, self._model, max_replicas, upper=straight).seconds() * _ROUNDING
        )


def hosts_of(parts: Sequence[NestedStage], levels: Sequence[Level]) -> list[tuple[int, ...]]:
    """Return the hosts of each innermost stage's replicas, numbered from 0; empty where the levels do not say any.

    A host is one of the level called "host", or else of the second level. A stage with copies on several groups
    has its replicas there in turn, so that a micro-batch, which replica j mod r of each stage takes, stays in a group:

        two hosts, each with a pipeline of two stages    stage 0: hosts 0 1    stage 1: hosts 0 1
        the same with two replicas of its first stage    stage 0: hosts 0 1 0 1
    """
    names = [level.name for level in levels]
    if "host" in names:
        return _placed(parts, levels, names.index("host"))
    if len(levels) > 1:
        return _placed(parts, levels, 1)
    return [() for _ in parts]


def _placed(parts: Sequence[NestedStage], levels: Sequence[Level], host: int) -> list[tuple[int, ...]]:
    """Return the hosts, counted from the first of these levels. host: the place of the level of hosts."""
    inner = levels[:-1]
    size = prod(level.count for level in inner[host:]) if len(inner) >= host else 0  # hosts of a group; 0: part of one
    first = 0
    found: list[tuple[int, ...]] = []
    for part in parts:
        for inside in _placed(part.inside, inner, host) if part.inside else [(0,)]:
            every = range(part.replicas * len(inside))
            found.append(tuple((first + j % part.replicas) * size + inside[j // part.replicas] for j in every))
        first += part.replicas
    return found


def _flat(levels: tuple[Level, ...]) -> Level:
    """Return one level of all devices with the fastest links, which is never slower than the nested levels.

    For replicas r1 within r2, (r1-1)/(r1² r2) + (r2-1)/r2² >= (r-1)/r² with r = r1·r2, and the outer all-reduce has no
    fewer bytes than the inner one.
    """
    devices = int(np.prod([level.count for level in levels]))
    return Level("all", devices, max(level.bandwidth for level in levels))


MOST_WORK = 2e8  # numbers that a search may compare, which takes a second or two


def work(states: int, levels: tuple[Level, ...], memory: Memory | None) -> float:
    """Return about how many numbers a search compares."""
    total = 0.0
    devices = 1
    for depth, level in enumerate(levels, start=1):
        is_top = depth == len(levels)
        inner, devices = devices, devices * level.count
        pairs = states**2 / 2 if is_top else states**3 / 6
        if memory is None:
            counts = [1] * level.count
        else:
            # By devices used and devices behind: how many devices the first stage may have with r replicas.
            tables = 1 if is_top else _behind(levels, depth)
            used = np.arange(1, devices + 1)
            counts = [tables * int(np.minimum(used // r, inner).sum()) for r in range(1, level.count + 1)]
        for r, count in enumerate(counts, start=1):
            columns = 1 if memory is not None and depth == 1 else level.count - r + 1
            # Each call of numpy costs as much as some thousand numbers.
            total += count * (pairs * columns + 2000 * states)
        if is_top and memory is None and depth == 1:
            total -= pairs * level.count * (level.count + 1) / 2  # where a window of the table is enough
    return total


def _behind(levels: tuple[Level, ...], depth: int) -> int:
    """Return how many numbers of devices may be behind each replica that the levels above `depth` make."""
    devices, copies = (int(np.prod([level.count for level in some])) for some in (levels, levels[depth:]))
    return sum(-(-devices // replicas) for replicas in range(1, copies + 1))


def affordable(states: int, most: int, levels: tuple[Level, ...], memory: Memory | None) -> int | None:
    """Return how many states can be searched in seconds; None: all `states` can.

    most: states that are each within the next, of which the result is a part.
    """
    most_work = MOST_WORK if memory is None else 2 * MOST_WORK  # tables of limited memory are small and fast
    if work(states, levels, memory) <= most_work:
        return None
    count = most
    while count > 2 and work(count, levels, memory) > most_work:
        count = max(2, int(count * 0.95))
    return count


def near(cuts: Sequence[int], count: int, kept: int) -> list[int]:
    """Return the `kept` of the first `count` numbers that are nearest to the cuts, with the first and the last."""
    distances = np.abs(np.arange(count)[:, None] - np.array(cuts)[None, :]).min(axis=1)
    distances[[0, -1]] = 0
    return sorted(int(number) for number in np.argsort(distances, kind="stable")[:kept])


def evenly(count: int, kept: int) -> list[int]:
    """Return `kept` of the first `count` numbers, evenly spaced, with the first and the last."""
    return [int(number) for number in np.linspace(0, count - 1, kept).astype(int)]


# Search for the fastest plan of a chain on one level within a limited memory.
#
# The slowest stage or side of the fastest plan takes least. Whether a plan is as fast as some time is a question
# for `min_devices`: for all cuts of a thousand layers, and all replicas on 64 devices, it takes some hundredths of a
# second. So the time between what no plan beats and what a known plan takes is halved until nothing lies between.

_ANY = sys.float_info.max  # seconds: whatever it takes
_GROUP_ROUNDING = 1e-6


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
        self.least_before: Ints = np.ceil(compute / of_device - _GROUP_ROUNDING).astype(int)
        self.least_behind: Ints = np.ceil((compute[-1] - compute) / of_device - _GROUP_ROUNDING).astype(int)
