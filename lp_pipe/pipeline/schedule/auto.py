"""Schedule "auto": a search for the shortest step."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence, Sized
from dataclasses import replace
from itertools import pairwise
from random import Random

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.costs import Costs, Seconds, one_each
from lp_pipe.pipeline.schedule.greedy import OrderPolicy, list_schedule
from lp_pipe.pipeline.schedule.ir import Schedule
from lp_pipe.pipeline.schedule.numbers_given import as_int
from lp_pipe.pipeline.schedule.orders import (
    BACKWARD,
    FORWARD,
    INPUTS,
    OPS,
    WEIGHTS,
    OrderingProblem,
    Orders,
    is_sound,
    makespan,
    split,
    start_times,
    to_schedule,
    token,
)
from lp_pipe.pipeline.schedule.registry import check_sizes, make_schedule, register_schedule
from lp_pipe.pipeline.schedule.simulate import simulate
from lp_pipe.pipeline.schedule.stash import check_memory, limits_by_worker
from lp_pipe.pipeline.schedule.verify import verify

_NAMED = ("1f1b", "gpipe", "zb_h1", "interleaved", "looped_bfs", "zbv", "dualpipev")
_CREDITS = 4  # messages on a channel, a pipeline's default
# The work of a search, counted in actions and not by a clock: large problems take no longer than small ones.
_LIST_SCHEDULES, _LIST_ACTIONS = 100, 60_000
_STEPS, _STEP_ACTIONS = 3_000, 1_500_000


def search_schedule(
    stages: int,
    microbatches: int,
    costs: Costs,
    *,
    chunks: int | None = None,
    memory: int | Sequence[int] | None = None,
    links: Seconds | None = None,
) -> Schedule:
    """Search for the schedule of `stages` workers with the shortest step, as `simulate` has it; the same every time.

    Never slower than any of lp_pipe's named schedules with as many virtual stages that keeps within the limit: greedy
    list schedules and all of those are where a local search begins. Several chunks are laid out in turn (as
    "interleaved" has them) and back and forth (as "zbv"), whichever is faster.

    chunks: virtual stages a worker; without, as many as lists in costs have numbers for, or 1. memory: activations that
    a worker may stash, one number or one per worker. links: as in `simulate`.

    Raises:
        ScheduleError: a number is wrong, or memory is less than a micro-batch needs.
    """
    stages, microbatches, chunks = as_int(stages), as_int(microbatches), as_int(chunks)
    if chunks is None:
        chunks = _chunks_of(costs, stages)
    check_sizes("schedule 'auto'", stages=stages, microbatches=microbatches, chunks=chunks)
    limits = _limits(memory, stages, microbatches, chunks)
    candidates = []
    for placement in _placements(stages, chunks):
        problem = _problem(placement, microbatches, costs, limits, links)
        candidates += [_PlacementSearch(problem).best(), *_named(problem, chunks)]
    return replace(min(candidates, key=lambda schedule: _rank(schedule, costs, links)), name="auto")


@register_schedule("auto")
def auto(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Order what a search finds for stages that all take as long, forward, backward for inputs and for weights alike.

    `search_schedule` does so for measured costs.

    Raises:
        ScheduleError: stages, microbatches or chunks is below 1.
    """
    equal = Costs(forward=1, backward_input=1, backward_weight=1)
    return search_schedule(stages, microbatches, equal, chunks=chunks)


class _PlacementSearch:
    """A search of schedules with one placement.

    List schedules by different policies come first, then moves from the best of them, and from the best named schedule.
    """

    def __init__(self, problem: OrderingProblem) -> None:
        self.problem = problem
        self.bound = _lower_bound(problem)
        self.tries = max(1, min(_LIST_SCHEDULES, _LIST_ACTIONS // problem.actions))
        self.steps = min(_STEPS, _STEP_ACTIONS // problem.actions)

    def best(self) -> Schedule:
        found = [self._best_list_schedule()]
        chunks = len(self.problem.placement) // self.problem.workers
        if self.steps:
            found += [split(schedule) for schedule in _named(self.problem, chunks)]
        runnable = [orders for orders in found if start_times(self.problem, orders) is not None]
        runnable.sort(key=self._seconds)
        begun = runnable[:2]
        for orders in begun:
            if self._seconds(runnable[0]) > self.bound:
                runnable.append(improve(self.problem, orders, self.steps // len(begun), self.bound))
                runnable.sort(key=self._seconds)
        return to_schedule("auto", join_backwards(self.problem, runnable[0], self.steps // 4))

    def _seconds(self, orders: Orders) -> float:
        starts = start_times(self.problem, orders)
        assert starts is not None, "only orders that can run get here"
        return makespan(self.problem, orders, starts)

    def _best_list_schedule(self) -> Orders:
        """Change one part of the policy at a time, and keep what helps, until no change does."""
        policy = OrderPolicy(caps=self._caps(1.0))
        best = list_schedule(self.problem, policy)
        best_s = self._seconds(best)
        tries, at_rest = self.tries - 1, False
        while not at_rest:
            at_rest = True
            for other in self._neighbours(policy):
                if tries <= 0 or best_s <= self.bound:
                    return best
                tries -= 1
                orders = list_schedule(self.problem, other)
                seconds = self._seconds(orders)
                if seconds < best_s:
                    policy, best, best_s, at_rest = other, orders, seconds, False
                    break
        return best

    def _neighbours(self, policy: OrderPolicy) -> Iterator[OrderPolicy]:
        for factor in (1.0, 1.5, 2.0, 3.0, float("inf")):
            yield replace(policy, caps=self._caps(factor))
        for after_forward, after_backward in ((INPUTS, FORWARD), (FORWARD, FORWARD), (INPUTS, INPUTS)):
            yield replace(policy, after_forward=after_forward, after_backward=after_backward)
        for gap in (0.0, 0.25, 0.5, 0.75, 1.0):
            yield replace(policy, gap=gap)
        yield replace(policy, frees_memory=not policy.frees_memory)
        if len(self.problem.placement) > self.problem.workers:
            yield replace(policy, deep_forwards=not policy.deep_forwards)
            yield replace(policy, deep_backwards=not policy.deep_backwards)
        for worker, cap in enumerate(policy.caps):
            for changed in (cap + 1, cap - 1):
                if len(self.problem.own[worker]) <= changed <= self.problem.limits[worker]:
                    yield replace(policy, caps=(*policy.caps[:worker], changed, *policy.caps[worker + 1 :]))

    def _caps(self, factor: float) -> tuple[int, ...]:
        """Return 1F1B's activations, times a factor: a worker has one for each stage from its first one on."""
        stages = len(self.problem.placement)
        wanted = (factor * (stages - own[0]) for own in self.problem.own)
        return tuple(
            max(len(own), int(min(limit, cap)))
            for own, limit, cap in zip(self.problem.own, self.problem.limits, wanted, strict=True)
        )


def _placements(stages: int, chunks: int) -> list[tuple[int, ...]]:
    """Return the ways to lay out the stages: in turn; back and forth."""
    there = tuple(range(stages))
    return list(dict.fromkeys([there * chunks, ((there + there[::-1]) * chunks)[: stages * chunks]]))


def _problem(
    placement: tuple[int, ...], microbatches: int, costs: Costs, limits: tuple[int, ...], links: Seconds | None
) -> OrderingProblem:
    durations = costs.durations(len(placement))
    pairs = one_each(0.0 if links is None else links, len(placement) - 1, "links", "pair of neighbouring stages")
    crosses = [one != other for one, other in pairwise(placement)]
    return OrderingProblem(
        placement=placement,
        microbatches=microbatches,
        durations=tuple(durations[op][stage] for stage in range(len(placement)) for op in OPS),
        delays=tuple(delay if crossing else 0.0 for delay, crossing in zip(pairs, crosses, strict=True)),
        limits=limits,
        credits=_CREDITS,
    )


def _named(problem: OrderingProblem, chunks: int) -> Iterator[Schedule]:
    """Yield the named schedules with this placement that keep within the limits."""
    for name in _NAMED:
        try:
            schedule = make_schedule(name, problem.workers, problem.microbatches, chunks)
            if schedule.placement == problem.placement:
                check_memory(schedule, problem.limits)
                yield schedule
        except ScheduleError:
            continue


def _rank(schedule: Schedule, costs: Costs, links: Seconds | None) -> tuple[float, bool, int, int]:
    """Return a key that prefers short steps, then few messages on their way, few activations, and few actions."""
    timeline = simulate(schedule, costs, links)
    actions = sum(map(len, schedule.workers))
    return timeline.makespan, _needs_more_credits(schedule), max(timeline.peak_activations), actions


def _needs_more_credits(schedule: Schedule) -> bool:
    try:
        verify(schedule, credits=_CREDITS)
    except ScheduleError:
        return True
    return False


def _lower_bound(problem: OrderingProblem) -> float:
    """Return seconds that no step beats: a worker waits for its first forward, and then has all its work."""
    durations, count = problem.durations, problem.microbatches
    bound = 0.0
    for own in problem.own:
        arrival = sum(durations[4 * stage + FORWARD] for stage in range(own[0])) + sum(problem.delays[: own[0]])
        work = sum(durations[4 * stage + op] for stage in own for op in range(3))
        bound = max(bound, arrival + count * work)
    return bound


def _chunks_of(costs: Costs, stages: int) -> int:
    values = (costs.forward, costs.backward_input, costs.backward_weight)
    lengths = [len(value) for value in values if isinstance(value, Sized)]
    return max(1, lengths[0] // stages) if lengths and isinstance(stages, int) and stages > 0 else 1


def _limits(memory: int | Sequence[int] | None, stages: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    whole = chunks * microbatches
    if memory is None:
        return (whole,) * stages
    limits = limits_by_worker("auto", memory, stages)
    for worker, limit in enumerate(limits):
        if limit < chunks:
            raise ScheduleError(
                f"schedule 'auto' with memory={limit} on worker {worker}: a micro-batch alone stashes {chunks} there: "
                f"use memory={chunks} or more"
            )
    return tuple(min(limit, whole) for limit in limits)


_MEMORY = 40  # steps for which an earlier, longer makespan is still accepted
_REACH = 12  # the most places that an action is moved at a time
_ROUNDING = 1e-12


def improve(problem: OrderingProblem, orders: Orders, steps: int, bound: float = 0.0) -> Orders:
    """Move actions on the critical path for `steps` steps, or until `bound` is reached.

    Late-acceptance hill climbing (Burke and Bykov, 2017): a step is taken unless it is worse than both the last order
    and the one of some steps ago, so that the search leaves local optima, and needs no temperature. The result is the
    same for the same input.
    """
    starts = start_times(problem, orders)
    assert starts is not None, "the search starts at an order that can run"
    random = Random(0)
    current, best = orders, orders
    current_s = best_s = makespan(problem, orders, starts)
    history = [current_s] * _MEMORY
    critical = _critical_actions(problem, current, starts)
    for step in range(steps):
        if best_s <= bound * (1 + _ROUNDING) or not critical:
            break
        worker, place = random.choice(critical)
        changed = _moved(current[worker], place, random)
        if changed is None or not is_sound(changed, problem.limits[worker]):
            continue
        tried = [*current[:worker], changed, *current[worker + 1 :]]
        starts = start_times(problem, tried)
        if starts is None:
            continue
        tried_s = makespan(problem, tried, starts)
        if tried_s <= max(current_s, history[step % _MEMORY]):
            current, current_s = tried, tried_s
            critical = _critical_actions(problem, current, starts)
        if tried_s < best_s:
            best, best_s = tried, tried_s
        history[step % _MEMORY] = current_s
    return best


def join_backwards(problem: OrderingProblem, orders: Orders, tries: int) -> Orders:
    """Make I and W that follow each other one B where that costs no time: whole backwards need less on real devices."""
    starts = start_times(problem, orders)
    assert starts is not None, "it could run before"
    longest_s = makespan(problem, orders, starts) * (1 + _ROUNDING)
    pending = [[pair for worker, order in enumerate(orders) for pair in _pairs(worker, order)]]
    joined: set[tuple[int, int]] = set()
    while pending and tries > 0:  # all at once, else by halves
        group = pending.pop()
        tries -= 1
        tried = _joined(orders, joined.union(group))
        starts = start_times(problem, tried)
        if starts is not None and makespan(problem, tried, starts) <= longest_s:
            joined.update(group)
        elif len(group) > 1:
            half = len(group) // 2
            pending += [group[half:], group[:half]]
    return _joined(orders, joined)


def _critical_actions(problem: OrderingProblem, orders: Orders, starts: list[list[float]]) -> list[tuple[int, int]]:
    """Return (worker, place) of actions on one longest path that started when the one before them ended.

    The path is followed from the action that ends last: back through its worker for as long as that was busy, then to
    the worker that sent the message it waited for.
    """
    durations, placement = problem.durations, problem.placement
    ends = [own[-1] + durations[order[-1]] for own, order in zip(starts, orders, strict=True)]
    worker = ends.index(max(ends))
    place = len(orders[worker]) - 1
    found = []
    while place >= 0:
        start, current = starts[worker][place], orders[worker][place]
        if place and start <= starts[worker][place - 1] + durations[orders[worker][place - 1]]:
            found.append((worker, place))
            place -= 1
            continue
        stage, op = current >> 2, current & 3
        before = stage - 1 if op == FORWARD else stage + 1
        if op == WEIGHTS or not 0 <= before < len(placement):
            break
        # Its message was sent by the last action that ended early enough, of those with that token.
        sender = placement[before]
        latest = start - problem.delays[min(stage, before)]
        place = bisect_right(starts[sender], latest) - 1
        while place >= 0 and orders[sender][place] != token(op, before):
            place -= 1
        worker = sender
    return found


def _moved(order: list[int], place: int, random: Random) -> list[int] | None:
    """Move an action before some that come before it, or one of those after it; None: nothing would change."""
    if random.random() < 0.5:
        target = max(0, place - 1 - random.randrange(_REACH))
        source = place
    else:
        source = max(0, place - 1 - random.randrange(_REACH))
        target = place
    low, high = min(source, target), max(source, target)
    if all(order[each] == order[source] for each in range(low, high + 1)):
        return None
    changed = order.copy()
    changed.insert(target, changed.pop(source))
    return changed


def _pairs(worker: int, order: list[int]) -> list[tuple[int, int]]:
    """Return (worker, place) of each I that is followed by its own W."""
    waiting: dict[int, int] = {}  # W still to come, by token
    pairs = []
    for place, current in enumerate(order):
        if current & 3 == INPUTS:
            waiting[current + 1] = waiting.get(current + 1, 0) + 1
            if waiting[current + 1] == 1 and order[place + 1 : place + 2] == [current + 1]:
                pairs.append((worker, place))
        elif current & 3 == WEIGHTS:
            waiting[current] -= 1
    return pairs


def _joined(orders: Orders, pairs: set[tuple[int, int]]) -> Orders:
    joined: Orders = []
    for worker, order in enumerate(orders):
        own: list[int] = []
        for place, current in enumerate(order):
            if (worker, place - 1) in pairs:
                continue
            own.append(token(BACKWARD, current >> 2) if (worker, place) in pairs else current)
        joined.append(own)
    return joined
