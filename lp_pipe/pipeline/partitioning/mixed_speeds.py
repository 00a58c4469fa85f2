"""Search on devices of different speeds, of one level: the exact dynamic program over cuts x replicas x devices.

From the last layer backwards, by state s of the model and place p of the devices (device_orders):

    best[p, s] = min over t, and the devices that a stage may take at p, of max(stage s..t on them, best[then, t])

where a stage on r devices of at least speed v takes (C/v + 4(r-1)W/(rB)) / r, and has its two sides of the boundaries.
Where memory is limited there is one such table for each number of devices used from s on.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lp_pipe.pipeline.partitioning.bounded_search import BoundedPlan, fastest_found, lower_bound
from lp_pipe.pipeline.partitioning.cost import CostModel, Memory, Waiting
from lp_pipe.pipeline.partitioning.device_orders import (
    Allocation,
    Allocations,
    CountedSpeeds,
    StageOnDevices,
    allocations_in_any_order,
    allocations_in_given_order,
    can_count,
    devices_in_any_order,
    devices_in_given_order,
    kinds_searched,
    rounded,
)
from lp_pipe.pipeline.partitioning.dynamic_program import NestedStage, device_seconds
from lp_pipe.pipeline.partitioning.profile import Profile
from lp_pipe.pipeline.partitioning.states import Floats, States
from lp_pipe.pipeline.partitioning.timed_stages import TimedStage, recomputed, slowest
from lp_pipe.pipeline.partitioning.topology import Level

ORDERS = ("any", "given")
MOST_WORK = 8.5e8  # numbers compared, some seconds: 500 layers on 64 devices in a given order, 1,000 on 8 in any
_OVERHEAD = 3000  # numbers that could be compared in the time of calling numpy once


class MixedSpeeds:
    """The search on the devices of a level, with their speeds.

    order: "given" or "any" of them along the pipeline.
    """

    def __init__(self, level: Level, model: CostModel, recompute: str, order: str) -> None:
        assert level.speeds is not None, "for equal devices there is another search"
        self._level = level
        self._speeds = level.speeds
        self._model = model
        self._recompute = recompute
        self._is_given = order == "given"
        self._kinds = kinds_searched(level.speeds)

    @property
    def inexact(self) -> str:
        """Return why not all that the devices allow is searched; empty where it is."""
        kinds = len(set(self._speeds))
        if self._is_given or kinds <= self._kinds:
            return ""
        return (
            f"{len(self._speeds)} devices of {kinds} different speeds are too many to search all their orders, so that "
            f"their speeds count as {self._kinds}"
        )

    def affordable(self, states: int, most: int, max_replicas: int, memory: Memory | None) -> int | None:
        """Return how many states, of `most` each within the next, can be searched in seconds; None: all `states`."""
        allocations = self._allocations(self._speeds_below, max_replicas)
        devices = len(self._speeds)
        if _work(allocations, states, memory, devices) <= MOST_WORK:
            return None
        count = most
        while count > 2 and _work(allocations, count, memory, devices) > MOST_WORK:
            count = max(2, int(count * 0.9))
        return count

    def acceptable_gap(self, memory: Memory | None) -> float:
        """Return the gap of plans that are good enough where a search of all takes too long."""
        return 0.05 if memory is None else np.inf  # bounds take no account of memory, and tables take a minute

    def is_as_fast_within_memory(self, states: States, max_replicas: int) -> bool:
        """Return whether a search within a memory limit takes no longer than one without."""
        return False

    def searched(self, states: States, max_replicas: int, memory: Memory | None) -> list[TimedStage] | None:
        """Return the best stages between these states; None: none fit the memory."""
        found = [self._found(way, states, max_replicas, memory) for way in self._ways()]
        if self.inexact and states.is_chain:
            plan = self.of_all_cuts(states, max_replicas, memory, lambda: self._least(states))
            found.append(plan.stages if plan is not None else None)
        return min((stages for stages in found if stages is not None), key=slowest, default=None)

    def of_all_cuts(
        self, states: States, max_replicas: int, memory: Memory | None, least: Callable[[], float]
    ) -> BoundedPlan | None:
        """Return a fast plan between all of these states, which are each within the next; None: none is found.

        least: computes the seconds that no plan beats.
        """
        if self._is_given or not can_count(self._speeds):
            return None
        search = CountedSpeeds(states, self._level, self._speeds, self._model, memory, max_replicas)
        return fastest_found(search.within, lambda found: self._timed(found, states, memory), least())

    def _ways(self) -> "list[_Variant]":
        """Return the ways to search, of which one is enough where that is exact."""
        places = range(len(self._speeds))
        if self._is_given:
            return [_Variant(self._speeds, places, is_given=True)]
        ways = [_Variant(self._speeds_below, places, is_given=False)]
        if self.inexact:
            slowest_first = sorted(places, key=lambda place: self._speeds[place])
            for order in (slowest_first, slowest_first[::-1]):
                ways.append(_Variant([self._speeds[place] for place in order], order, is_given=True))
        return ways

    def _found(
        self, way: "_Variant", states: States, max_replicas: int, memory: Memory | None
    ) -> list[TimedStage] | None:
        allocations = (allocations_in_given_order if way.is_given else allocations_in_any_order)(
            way.speeds, max_replicas
        )
        steps = _AllocationTables(states, allocations, self._level, self._model, memory).best()
        if steps is None:
            return None
        serve = devices_in_given_order if way.is_given else devices_in_any_order
        served = serve(way.speeds, [step.allocation for step in steps])
        devices = [tuple(sorted(way.devices[place] for place in places)) for places in served]
        stages = [StageOnDevices(step.start, step.end, taken) for step, taken in zip(steps, devices, strict=True)]
        return self._timed(stages, states, memory)

    def lower_bound(self, states: States, profile: Profile, max_replicas: int, memory: Memory | None) -> float:
        """Return seconds that no plan beats; with a memory limit a rough bound only."""
        compute = float(states.compute[-1])
        bound = lower_bound(compute, self._speeds, self._level, self._model, max_replicas, profile)
        if memory is not None:
            return bound
        if not states.is_complete or self.affordable(states.count, states.count, max_replicas, None) is not None:
            return bound
        allocations = self._allocations(
            rounded(self._speeds, self._kinds)[1] if self.inexact else self._speeds, max_replicas
        )
        return max(bound, _AllocationTables(states, allocations, self._level, self._model, None).seconds)

    def _least(self, states: States) -> float:
        """Return the seconds of all devices together."""
        return float(states.compute[-1]) / sum(self._speeds)

    @property
    def _speeds_below(self) -> Sequence[float]:
        return rounded(self._speeds, self._kinds)[0] if self.inexact else self._speeds

    def _allocations(self, speeds: Sequence[float], max_replicas: int) -> Allocations:
        return (allocations_in_given_order if self._is_given else allocations_in_any_order)(speeds, max_replicas)

    def _timed(self, stages: Sequence[StageOnDevices], states: States, memory: Memory | None) -> list[TimedStage]:
        parts = [NestedStage(stage.start, stage.end, len(stage.devices), []) for stage in stages]
        again = recomputed(parts, states, memory, self._recompute)
        return [self._stage(stage, states, (stage.start, stage.end) in again) for stage in stages]

    def _stage(self, served: StageOnDevices, states: States, is_recomputed: bool) -> TimedStage:
        start, end, devices = served
        replicas, level, model = len(devices), self._level, self._model
        speed = min(self._speeds[device] for device in devices)
        forward, compute = (s / speed for s in states.seconds(start, end, is_recomputed))
        parameters = float(states.parameters[end] - states.parameters[start])
        sides = [float(model.boundary(states.crossing[state], replicas, level)) for state in (start, end)]
        return TimedStage(
            start,
            end,
            replicas,
            float(model.stage(compute, parameters, replicas, level)),
            max(sides),
            forward,
            compute - forward,
            model.message(float(states.crossing[start]), level),
            float(model.exchange(parameters, replicas, level)),
            is_recomputed,
            devices,
            devices if level.name == "host" else (),
        )


class _Variant(NamedTuple):
    """A way to search.

    speeds: as they count; devices: in the same order. is_given: they are taken in this order.
    """

    speeds: Sequence[float]
    devices: Sequence[int]
    is_given: bool


class _AllocatedStage(NamedTuple):
    """A stage between two states, with the devices that it takes."""

    start: int
    end: int
    allocation: Allocation


class _AllocationTables:
    """The tables of one search.

    _best[devices used, place, state]: seconds; where memory is not limited, those of any number of devices are at 1.
    """

    def __init__(
        self, states: States, allocations: Allocations, level: Level, model: CostModel, memory: Memory | None
    ) -> None:
        self._states = states
        self._allocations = allocations
        self._level = level
        self._model = model
        self._memory = memory
        self._kinds = {
            kind: i for i, kind in enumerate(sorted({allocation[:2] for some in allocations for allocation in some}))
        }
        self._most = _most_used(allocations, states.count, level.count) if memory is not None else 1
        self._best = np.full((self._most + 1, len(allocations), states.count), np.inf)
        self._best[0, :, -1] = 0
        if memory is None:
            self._best[1] = self._best[0]
        self._solve()

    @property
    def seconds(self) -> float:
        """Return the seconds of the slowest stage or boundary of the best plan; inf where none fits."""
        return float(self._best[1:, 0, 0].min())

    def best(self) -> list[_AllocatedStage] | None:
        """Return the stages of the best plan."""
        if not np.isfinite(self.seconds):
            return None
        used, place, state = 1 + int(self._best[1:, 0, 0].argmin()), 0, 0
        enough = self.seconds
        steps = []
        while state != self._states.count - 1:
            step = self._choice(used, place, state, enough)
            steps.append(step)
            used, place, state = self._after(used, step.allocation.replicas), step.allocation.next_place, step.end
        return steps

    def _after(self, used: int, replicas: int) -> int:
        return used if self._memory is None else used - replicas

    def _within(self, allocations: Sequence[Allocation], used: int) -> list[Allocation]:
        """Return the allocations that take no more devices than are to be used."""
        return [allocation for allocation in allocations if self._memory is None or allocation.replicas <= used]

    def _solve(self) -> None:
        for used in range(1, self._most + 1):
            costs = self._costs(used, slice(None))
            for place in reversed(range(len(self._allocations))):
                taken = self._within(self._allocations[place], used)
                for some in range(0, len(taken), self._at_once):
                    part = taken[some : some + self._at_once]
                    kinds = [self._kinds[allocation[:2]] for allocation in part]
                    after = [self._after(used, allocation.replicas) for allocation in part]
                    rest = self._best[after, [allocation.next_place for allocation in part]]
                    found = np.maximum(costs[kinds], rest[:, None, :]).min(axis=(0, 2))
                    np.minimum(self._best[used, place], found, out=self._best[used, place])

    @property
    def _at_once(self) -> int:
        """Return how many options have numbers that stay in the cache, more or less."""
        return max(1, 1_000_000 // self._states.count**2)

    def _costs(self, used: int, starts: slice) -> Floats:
        """Return the seconds of a stage with its two sides, by kind of option, start and end."""
        states, level, model = self._states, self._level, self._model
        parameters = np.maximum(states.parameters[None, :] - states.parameters[starts, None], 0)
        crossing = np.maximum(states.crossing[starts, None], states.crossing[None, :])
        costs = np.full((len(self._kinds), *parameters.shape), np.inf)
        of_a_device: dict[Waiting, Floats] = {}
        for (replicas, speed), kind in self._kinds.items():
            if self._memory is not None and replicas > used:
                continue
            waiting = self._memory.waiting_on(replicas, used - replicas) if self._memory is not None else Waiting(0, 0)
            if waiting not in of_a_device:
                of_a_device[waiting] = device_seconds(states, self._memory, waiting)[starts]
            stage = model.stage(of_a_device[waiting] / speed, parameters, replicas, level)
            costs[kind] = np.maximum(stage, model.boundary(crossing, replicas, level))
        return costs

    def _choice(self, used: int, place: int, state: int, enough: float) -> _AllocatedStage:
        costs = self._costs(used, slice(state, state + 1))[:, 0]
        for allocation in sorted(self._within(self._allocations[place], used)):  # few devices and slow ones first
            behind = self._best[self._after(used, allocation.replicas), allocation.next_place]
            ends = np.flatnonzero(np.maximum(costs[self._kinds[allocation[:2]]], behind) <= enough)
            if len(ends):
                return _AllocatedStage(state, int(ends[-1]), allocation)
        raise AssertionError("the table holds a number that none of its choices makes")


def _work(allocations: Allocations, states: int, memory: Memory | None, devices: int) -> float:
    """Return about how many numbers a search compares."""
    options = sum(len(some) for some in allocations)
    tables = 1 if memory is None else _most_used(allocations, states, devices)
    return tables * (options * states**2 + _OVERHEAD * len(allocations))


def _most_used(allocations: Allocations, states: int, devices: int) -> int:
    """Return how many devices a plan may use."""
    return min((states - 1) * max(allocation.replicas for allocation in allocations[0]), devices)
