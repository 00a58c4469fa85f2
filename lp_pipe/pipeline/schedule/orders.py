"""Schedules as lists of small numbers, which `search_schedule` tries by the thousand.

A token says op and stage; the micro-batch follows from its place, since each stage runs them in order. So whatever is
moved, gradients accumulate in micro-batch order and messages are received as they were sent.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from lp_pipe.pipeline.schedule.ir import Action, Op, Schedule

FORWARD, INPUTS, WEIGHTS, BACKWARD = range(4)
OPS: tuple[Op, ...] = ("F", "I", "W", "B")
_STASHED = (1, 0, -1, -1)  # by op

Orders = list[list[int]]  # tokens by worker


def token(op: int, stage: int) -> int:
    """Return op and stage in one small number: op in its last two bits."""
    return 4 * stage + op


@dataclass(frozen=True)
class OrderingProblem:
    """The actions that are to be ordered, with their times and limits.

    durations: seconds by token. delays: seconds from a stage to the next one and back. limits: activations by worker.
    credits: messages that may wait on a channel between two workers.
    """

    placement: tuple[int, ...]
    microbatches: int
    durations: tuple[float, ...]
    delays: tuple[float, ...]
    limits: tuple[int, ...]
    credits: int

    @property
    def workers(self) -> int:
        return len(self.limits)

    @cached_property
    def own(self) -> tuple[tuple[int, ...], ...]:
        """Return each worker's stages."""
        return tuple(
            tuple(stage for stage, owner in enumerate(self.placement) if owner == worker)
            for worker in range(self.workers)
        )

    @property
    def actions(self) -> int:
        """Return how many actions there are, where all backwards are split."""
        return 3 * len(self.placement) * self.microbatches

    @cached_property
    def credits_from(self) -> tuple[int, ...]:
        """Return the credits on the channels between each stage and the next one.

        Within a worker that is all that may be needed.
        """
        return tuple(self.credits if one != other else self.microbatches for one, other in pairwise(self.placement))


def start_times(problem: OrderingProblem, orders: Orders) -> list[list[float]] | None:
    """Return when each action starts, as `simulate` has it; None where they would wait for each other for ever.

    Where a channel is full, an action does not start. (Real workers compute first and then wait: that deadlocks no
    more often.)
    """
    durations, delays, room = problem.durations, problem.delays, problem.credits_from
    stages = len(problem.placement)
    last = stages - 1
    forwards: list[list[float]] = [[] for _ in range(stages)]  # when they end, by micro-batch
    backwards: list[list[float]] = [[] for _ in range(stages)]
    waiting: list[list[int]] = [[] for _ in range(2 * stages)]  # workers, by what they wait for
    starts: list[list[float]] = [[] for _ in orders]
    free_at = [0.0] * len(orders)
    runnable = list(range(len(orders)))
    while runnable:
        worker = runnable.pop()
        now, own_starts = free_at[worker], starts[worker]
        order = orders[worker]
        for place in range(len(own_starts), len(order)):
            current = order[place]
            stage, op = current >> 2, current & 3
            if op == WEIGHTS:
                own_starts.append(now)
                now += durations[current]
                continue
            if op == FORWARD:
                done, awaits, before, after = forwards, 0, stage - 1, stage + 1
            else:
                done, awaits, before, after = backwards, 1, stage + 1, stage - 1
            number = len(done[stage])
            if 0 <= before <= last:
                arrived = done[before]
                if len(arrived) <= number:
                    waiting[2 * before + awaits].append(worker)
                    break
                arrival = arrived[number] + delays[min(stage, before)]
                if arrival > now:
                    now = arrival
            if 0 <= after <= last and number - len(done[after]) >= room[min(stage, after)]:
                waiting[2 * after + awaits].append(worker)
                break
            own_starts.append(now)
            now += durations[current]
            done[stage].append(now)
            woken = waiting[2 * stage + awaits]
            if woken:
                runnable.extend(woken)
                woken.clear()
        free_at[worker] = now
    complete = all(len(own) == len(order) for own, order in zip(starts, orders, strict=True))
    return starts if complete else None


def makespan(problem: OrderingProblem, orders: Orders, starts: list[list[float]]) -> float:
    """Return the seconds until the last worker has ended, from the `start_times` of these orders."""
    durations = problem.durations
    return max(own[-1] + durations[order[-1]] for own, order in zip(starts, orders, strict=True))


def is_sound(order: list[int], limit: int) -> bool:
    """Return whether every F comes before its I and that before its W, with no more than `limit` stashed."""
    done: Counter[int] = Counter()
    for current in order:
        op = current & 3
        if op and done[current] >= done[current - 1]:  # what op - 1 of this stage has done
            return False
        done[current] += 1
    return max(accumulate(_STASHED[current & 3] for current in order)) <= limit


def split(schedule: Schedule) -> Orders:
    """Return the order of a schedule with its backwards in two parts: that is never slower."""
    orders: Orders = []
    for actions in schedule.workers:
        order: list[int] = []
        for op, stage, _ in actions:
            both = (INPUTS, WEIGHTS) if op == "B" else (OPS.index(op),)
            order.extend(token(each, stage) for each in both)
        orders.append(order)
    return orders


def to_schedule(name: str, orders: Orders) -> Schedule:
    """Return the orders as a schedule; micro-batches are numbered as each stage runs them."""
    return Schedule(name, tuple(_actions(order) for order in orders))


def _actions(order: list[int]) -> tuple[Action, ...]:
    done: Counter[int] = Counter()
    actions = []
    for current in order:
        stage, op = divmod(current, 4)
        kinds = (INPUTS, WEIGHTS) if op == BACKWARD else (op,)
        actions.append(Action(OPS[op], stage, done[token(kinds[0], stage)]))
        done.update(token(kind, stage) for kind in kinds)
    return tuple(actions)
