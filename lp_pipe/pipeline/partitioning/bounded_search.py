"""A fast search of a chain's plans that reports how far its plan may be from the best.

A place says which devices are taken, and the search goes through the places from the last stage to the first. For a
limit of seconds it keeps how far the stages on the devices of each place reach towards the first layer:

    reach[place] = min over the ways to take devices of the first state from which a stage on these devices, which ends
                   at reach[place before], keeps to the limit

To reach farthest is not always best, because links differ in speed and tensors in size. So each place has one such
number for each of the loads that the link before it may have to carry, and the plan may still not be the best. What
the search reports is the gap between its plan and a lower bound.

The limit is halved between the bound and the plan that is known. Source: parametric search over the bottleneck, as in
"Fast optimal load balancing algorithms for 1D partitioning" (Pinar and Aykanat, JPDC 2004), section 4; the cost of a
stage is that of PipeDream (Narayanan et al., SOSP 2019), section 3.1.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from lp_pipe.pipeline.partitioning.cost import CostModel, Memory, Waiting
from lp_pipe.pipeline.partitioning.min_devices import Ints
from lp_pipe.pipeline.partitioning.profile import Profile
from lp_pipe.pipeline.partitioning.states import Bools, Floats, States
from lp_pipe.pipeline.partitioning.timed_stages import TimedStage, slowest
from lp_pipe.pipeline.partitioning.topology import Level

Found = TypeVar("Found")

_UNLIMITED_S = 1e200
_NEAR = 0.0005  # plans that differ by no more of their time are equally good
_FARTHER = (1e-9, *(0.001 * 4**power for power in range(7)), np.inf)  # from the bound: plans are mostly near to it
_ATTEMPTS = 40


class Kind(NamedTuple):
    """The devices of one stage: its replicas on each level, and the speed of the slowest device."""

    replicas: tuple[int, ...]
    speed: float = 1.0


class Step(NamedTuple):
    """Ways to take the devices of one more stage, by place before and after; an array has a number for each way.

    kind: a number in `Devices.kinds`. behind, before: replicas that share the link behind the stage, and before it.
    """

    source: Ints
    target: Ints
    kind: Ints
    behind: Ints
    before: Ints


class Devices(Protocol):
    """The places, of which the first is that of no devices taken.

    level_at: by place, the level of the links between the devices that are taken there and the others. steps: in an
    order in which no step leads to a place from which an earlier one starts.
    """

    count: int
    kinds: Sequence[Kind]
    level_at: Ints
    steps: Sequence[Step]


class ChainStage(NamedTuple):
    """A stage between two states. source: the place before its devices are taken."""

    start: int
    end: int
    kind: Kind
    source: int


class BoundedPlan(NamedTuple):
    """A plan, and the seconds that no plan beats."""

    stages: list[TimedStage]
    least: float

    @property
    def seconds(self) -> float:
        """Return the seconds of the slowest stage or side of a boundary."""
        return slowest(self.stages)

    @property
    def gap(self) -> float:
        """Return by what share the best plan may be faster at most."""
        return max(0.0, self.seconds / self.least - 1) if self.least else 0.0


def fastest_found(
    within: Callable[[float], list[Found]], timed: Callable[[list[Found]], list[TimedStage]], least: float
) -> BoundedPlan | None:
    """Return the fastest plan that `within` finds for some limit of seconds; None where it finds none.

    timed: computes what the stages take that `within` finds. least: seconds that no plan beats.
    """
    low = least
    for share in _FARTHER:
        limit = least * (1 + share) if share < np.inf else _UNLIMITED_S
        found = within(limit)
        if found:
            break
        low = limit
    else:
        return None
    best = BoundedPlan(timed(found), least)
    known = best.seconds
    for _ in range(_ATTEMPTS):
        if known <= low * (1 + _NEAR):
            break
        limit = (low + known) / 2
        found = within(limit)
        if found:
            best = min(best, BoundedPlan(timed(found), least), key=lambda plan: plan.seconds)
            known = min(limit, best.seconds)
        else:
            low = limit
    return best


def lower_bound(
    compute: float, speeds: Sequence[float], level: Level, model: CostModel, max_replicas: int, profile: Profile
) -> float:
    """Return seconds that no plan on devices of these speeds beats, known without a search.

    compute: seconds of all layers on a device of speed 1.
    """
    replicas: Floats = np.arange(1, max_replicas + 1, dtype=np.float64)
    of_layers = [  # the stage of a layer has at least its compute and its parameters
        model.stage((layer.forward_s + layer.backward_s) / max(speeds), layer.parameter_bytes, replicas, level).min()
        for layer in profile.layers
    ]
    return max(compute / sum(speeds), float(max(of_layers)))


class BoundedSearch:
    """A search of stages between all states of a chain."""

    def __init__(
        self, states: States, levels: Sequence[Level], model: CostModel, memory: Memory | None, devices: Devices
    ) -> None:
        self._states = states
        self._levels = levels
        self._model = model
        self._devices = devices
        self._replicas: Ints = np.array([int(np.prod(kind.replicas)) for kind in devices.kinds])
        self._offsets = np.cumsum([0, *(len(step.source) for step in devices.steps)])
        self._most_shares = max(max(kind.replicas) for kind in devices.kinds)
        self._memory = None if memory is None else _HeldBytes(states, memory, self._replicas, devices.count)

    def within(self, limit: float) -> list[ChainStage]:
        """Find stages of which none, and no side of a boundary, takes more seconds; empty where none are found."""
        following, first = self._following(limit), self._first_in_time(limit, 0.0)
        starts = _Starts(following, first, self._first_recomputed(limit), self._memory)
        return self._traced(*self._swept(starts, following.shape[1]))

    def _swept(self, starts: "_Starts", rows: int) -> tuple[Ints, Ints]:
        """Return how far the stages on each place's devices reach, and by which ways.

        By load and place: the first state and the number of devices used, as one number; and the way that leads there.
        """
        count, base = self._states.count, self._devices.count + 1
        keys = np.full((rows, len(self._devices.level_at)), count * base)
        keys[:, 0] = (count - 1) * base
        chosen = np.full(keys.shape, -1)
        for offset, step in zip(self._offsets, self._devices.steps, strict=False):
            ends, used = np.divmod(keys[np.minimum(step.behind, rows) - 1, step.source], base)
            some = np.flatnonzero(ends < count)
            if not len(some):
                continue
            kind, target, end = step.kind[some], step.target[some], ends[some]
            own = np.minimum(step.before[some], rows) - 1
            found = starts.of(kind, end, used[some], self._devices.level_at[target], own)
            key = np.where(found < end, found * base + used[some] + self._replicas[kind], count * base)
            for row in range(rows):
                known = keys[row, target]
                np.minimum.at(keys[row], target, key[row])
                better = (key[row] < known) & (key[row] == keys[row, target])
                chosen[row, target[better]] = offset + some[better]
        return keys, chosen

    def _traced(self, keys: Ints, chosen: Ints) -> list[ChainStage]:
        """Return the stages of the plan on the fewest devices that reaches the first state."""
        base = self._devices.count + 1
        row, place = len(keys) - 1, int(keys[-1].argmin())
        if keys[row, place] >= base:
            return []
        stages = []
        while place:
            number = int(np.searchsorted(self._offsets, chosen[row, place], side="right")) - 1
            step, way = self._devices.steps[number], int(chosen[row, place] - self._offsets[number])
            source, start = int(step.source[way]), int(keys[row, place] // base)
            row = min(int(step.behind[way]), len(keys)) - 1
            kind = self._devices.kinds[step.kind[way]]
            stages.append(ChainStage(start, int(keys[row, source] // base), kind, source))
            place = source
        return stages

    def _following(self, limit: float) -> Ints:
        """Return the first state from each one on that may be a boundary, by level and replicas that share the link.

        One row is enough for all numbers of replicas with which any tensor may cross.
        """
        latency, bandwidth = (
            np.array([getattr(level, name) for level in self._levels])[:, None] for name in ("latency", "bandwidth")
        )
        shares = np.arange(1, self._most_shares + 1)
        most = np.maximum(limit * shares - 2 * latency, 0) * bandwidth / 2
        crossing, count = self._states.crossing, self._states.count
        rows = 1 + int((most < crossing.max()).any(axis=0).sum())
        may_cross = crossing <= most[:, :rows, None]
        following = np.full((*may_cross.shape[:2], count + 1), count)
        following[:, :, :-1] = np.where(may_cross, np.arange(count), count)
        return np.minimum.accumulate(following[:, :, ::-1], axis=2)[:, :, ::-1]

    def _first_recomputed(self, limit: float) -> Ints | None:
        if self._memory is None or not self._memory.may_recompute:
            return None
        return self._first_in_time(limit, 0.0 if self._states.recomputes_all else 1.0)

    def _first_in_time(self, limit: float, forwards: float) -> Ints:
        """Return the first state from which a stage keeps to the limit, by kind and end.

        forwards: how many more times the stage runs its forward.
        """
        compute = self._states.compute + forwards * self._states.forward
        return np.stack([self._first_of_kind(kind, compute, limit) for kind in self._devices.kinds])

    def _first_of_kind(self, kind: Kind, compute: Floats, limit: float) -> Ints:
        terms, shares = [], 1
        for level, replicas in zip(reversed(self._levels), reversed(kind.replicas), strict=True):
            shares *= replicas
            fixed = float(self._model.exchange(0.0, replicas, level))
            terms.append((0.0, (float(self._model.exchange(1.0, replicas, level)) - fixed) / shares, fixed / shares))
        terms.append((1 / (kind.speed * shares), 0.0, 0.0))
        if self._model.name != "overlap":  # in which each may take as long as the limit, else all together
            terms = [(sum(term[0] for term in terms), sum(term[1] for term in terms), sum(term[2] for term in terms))]
        first = [
            _first(per_second * compute + per_byte * self._states.parameters, limit - fixed)
            for per_second, per_byte, fixed in terms
        ]
        latest: Ints = np.maximum.reduce(first)
        return latest


class _HeldBytes:
    """The bytes that stages hold, and whether they fit, for each number of devices behind them."""

    def __init__(self, states: States, memory: Memory, replicas: Ints, devices: int) -> None:
        behind = np.arange(devices + 1)[None, :]
        waiting = memory.waiting_on(replicas[:, None], behind)
        numbers = np.stack([np.broadcast_to(value, (len(replicas), devices + 1)) for value in waiting], axis=-1)
        different, place = np.unique(numbers.reshape(-1, 2), axis=0, return_inverse=True)
        self.may_recompute = memory.recompute != "none"
        self._states = states
        self._memory = memory
        self._waiting = Waiting(different[:, 0], different[:, 1])
        self._place = place.reshape(numbers.shape[:2])  # by kind and devices behind
        each = [Waiting(*numbers) for numbers in different]
        never = np.full(states.count + 1, states.count)
        self._kept = np.stack([self._first_kept(held) if memory.recompute != "full" else never for held in each])
        self._recomputed = np.stack([self._first_recomputed(held) for held in each])

    def _first_kept(self, waiting: Waiting) -> Ints:
        states, limit = self._states, self._memory.limit
        first = _first(self._memory.kept(states.parameters, states.activations, waiting), limit)
        parameters = states.parameters - states.parameters[first[:-1]]
        activations = states.activations - states.activations[first[:-1]]
        first[:-1] += self._memory.kept(parameters, activations, waiting) > limit  # sums are rounded
        return first

    def _first_recomputed(self, waiting: Waiting) -> Ints:
        """Return the first states as if nothing entered the stage."""
        states = self._states
        return _first(
            self._memory.needed_to_recompute(states.parameters, states.activations, 0.0, waiting), self._memory.limit
        )

    def first(self, kind: Ints, ends: Ints, used: Ints) -> tuple[Ints, Ints]:
        """Return from which state on a stage fits that keeps all, and the earliest one for a stage that recomputes."""
        place = self._place[kind, used]
        return self._kept[place, ends], self._recomputed[place, ends]

    def fits(self, kind: Ints, starts: Ints, ends: Ints, used: Ints) -> Bools:
        """Return whether stages that recompute fit."""
        states, place = self._states, self._place[kind, used]
        inside = np.minimum(starts, states.count - 1)
        waiting = Waiting(self._waiting.microbatches[place], self._waiting.versions[place])
        needed = self._memory.needed_to_recompute(
            states.parameters[ends] - states.parameters[inside],
            states.activations[ends] - states.activations[inside],
            states.crossing[inside],
            waiting,
        )
        fits: Bools = needed <= self._memory.limit
        return fits


class _Starts:
    """The states at which stages may start, for one limit of seconds.

    recomputed: the first ones in time for stages that run their forward twice; None: none does.
    """

    def __init__(self, following: Ints, first: Ints, recomputed: Ints | None, memory: _HeldBytes | None) -> None:
        self._following = following
        self._first = first
        self._recomputed = recomputed
        self._memory = memory

    def of(self, kind: Ints, ends: Ints, used: Ints, level: Ints, own: Ints) -> Ints:
        """Return the first state from which a stage may go to its end, by load of the link before it and by way.

        used: devices behind the stage. level: of the link before it. own: the load that the stage's replicas can take.
        """
        rows = np.minimum(own, np.arange(self._following.shape[1])[:, None])
        first = self._first[kind, ends]
        if self._memory is None:
            return self._following[level, rows, first]
        kept, needed = self._memory.first(kind, ends, used)
        starts = self._following[level, rows, np.maximum(first, kept)]
        if self._recomputed is None:
            return starts
        # A stage that recomputes holds its input, which may be large at any state: so each state is tried.
        tried = self._following[level, rows, np.maximum(self._recomputed[kind, ends], needed)]
        while True:
            lacks = (tried < np.minimum(starts, ends)) & ~self._memory.fits(kind, tried, ends, used)
            if not lacks.any():
                return np.minimum(starts, tried)
            tried = np.where(lacks, self._following[level, rows, tried + lacks], tried)


def _first(sums: Floats, allowed: float) -> Ints:
    """Return the first state from which the sums do not grow by more than is allowed, by state as the end.

    The last number stands for an end that is not reached.
    """
    return np.append(np.searchsorted(sums, sums - allowed, side="left"), len(sums))
