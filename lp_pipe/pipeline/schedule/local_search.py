"""Local search: small changes to an order of actions, kept when the step does not become longer."""

from bisect import bisect_right
from random import Random

from lp_pipe.pipeline.schedule.orders import (
    BACKWARD,
    FORWARD,
    INPUTS,
    WEIGHTS,
    OrderingProblem,
    Orders,
    is_sound,
    makespan,
    start_times,
    token,
)

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
