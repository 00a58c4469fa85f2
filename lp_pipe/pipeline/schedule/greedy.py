"""List scheduling: a worker that becomes free runs, by a policy, one of the actions that it could."""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from lp_pipe.pipeline.schedule.orders import FORWARD, INPUTS, WEIGHTS, OrderingProblem, Orders, token


@dataclass(frozen=True)
class OrderPolicy:
    """The preferences of a free worker.

    caps: activations by worker from which on no forward starts; within the problem's limits.
    after_forward, after_backward: the op that is preferred then.
    deep_forwards, deep_backwards: whether later stages come first, among a worker's own.
    gap: a W is put before something that comes later by at least this share of its time.
    frees_memory: whether a W comes first where it lets a forward start.
    """

    caps: tuple[int, ...]
    after_forward: int = INPUTS
    after_backward: int = INPUTS
    deep_forwards: bool = True
    deep_backwards: bool = True
    gap: float = 0.5
    frees_memory: bool = False


class _Choice(NamedTuple):
    start_s: float
    worker: int
    token: int
    request: int  # the number of the request to this worker; a choice of an older request is void


def list_schedule(problem: OrderingProblem, policy: OrderPolicy) -> Orders:
    """Order all actions as they start. No deadlock is possible: see `_Workers.may_stash`."""
    workers = _Workers(problem, policy)
    choices = [choice for worker in range(problem.workers) for choice in workers.ask(worker, 0.0)]
    heapify(choices)
    while choices:
        choice = heappop(choices)
        if choice.request != workers.requests[choice.worker]:
            continue
        for worker in workers.run(choice):
            for following in workers.ask(worker, choice.start_s):
                heappush(choices, following)
    return workers.orders


class _Workers:
    def __init__(self, problem: OrderingProblem, policy: OrderPolicy) -> None:
        self.problem = problem
        self.policy = policy
        self.orders: Orders = [[] for _ in range(problem.workers)]
        self.requests = [0] * problem.workers
        self.free_at = [0.0] * problem.workers
        self.stashed = [0] * problem.workers
        self.forwards: list[list[float]] = [[] for _ in problem.placement]  # when they end
        self.backwards: list[list[float]] = [[] for _ in problem.placement]
        self.weights = [0] * len(problem.placement)
        # How many of the worker's stages come after a stage.
        self.later = {stage: len(own) - 1 - place for own in problem.own for place, stage in enumerate(own)}

    def ask(self, worker: int, now: float) -> list[_Choice]:
        """Return what a worker runs next if nothing else happens before; empty: it has to wait for others."""
        self.requests[worker] += 1
        free_at = max(now, self.free_at[worker])
        ready = self._ready(worker, free_at)
        weights = self._next_weights(worker)
        chosen = min(ready) if ready else None
        if weights is not None and self._is_time_for_weights(worker, weights, free_at, chosen):
            return [_Choice(free_at, worker, weights, self.requests[worker])]
        return [] if chosen is None else [_Choice(chosen[0], worker, chosen[2], self.requests[worker])]

    def run(self, choice: _Choice) -> set[int]:
        """Run an action, and return the workers for which that changes something."""
        start_s, worker, chosen, _ = choice
        stage, op = chosen >> 2, chosen & 3
        self.orders[worker].append(chosen)
        end_s = self.free_at[worker] = start_s + self.problem.durations[chosen]
        if op == WEIGHTS:
            self.weights[stage] += 1
            self.stashed[worker] -= 1
            return {worker}
        if op == FORWARD:
            self.stashed[worker] += 1
        (self.forwards if op == FORWARD else self.backwards)[stage].append(end_s)
        placement = self.problem.placement
        return {worker, *placement[max(0, stage - 1) : stage], *placement[stage + 1 : stage + 2]}

    def may_stash(self, stage: int, limits: tuple[int, ...]) -> bool:
        """Return whether a worker may run one more forward of a stage, and one of each of its later stages.

        So a micro-batch that has started can always go through all later stages, and back.
        """
        worker = self.problem.placement[stage]
        return self.stashed[worker] + self.later[stage] < limits[worker]

    def _ready(self, worker: int, free_at: float) -> list[tuple[float, tuple[bool, int], int]]:
        """Return the forwards and backwards for inputs that a worker could run.

        Of each: when it could start, its preference (smaller is better), and its token.
        """
        policy = self.policy
        order = self.orders[worker]
        last_op = next((current & 3 for current in reversed(order[-3:]) if current & 3 != WEIGHTS), FORWARD)
        preferred = policy.after_forward if last_op == FORWARD else policy.after_backward
        ready = []
        for stage in self.problem.own[worker]:
            forward = self._forward_at(stage)
            if forward is not None and self.may_stash(stage, policy.caps):
                rank = -stage if policy.deep_forwards else stage
                ready.append((max(forward, free_at), (preferred != FORWARD, rank), token(FORWARD, stage)))
            backward = self._backward_at(stage)
            if backward is not None:
                rank = -stage if policy.deep_backwards else stage
                ready.append((max(backward, free_at), (preferred != INPUTS, rank), token(INPUTS, stage)))
        return ready

    def _forward_at(self, stage: int) -> float | None:
        """Return when the next forward of a stage has its input, if that is known and its output has room."""
        number = len(self.forwards[stage])
        if number == self.problem.microbatches:
            return None
        if stage + 1 < len(self.forwards):
            waiting = number - len(self.forwards[stage + 1])
            if waiting >= self.problem.credits_from[stage]:
                return None
        if not stage:
            return 0.0
        arrived = self.forwards[stage - 1]
        return arrived[number] + self.problem.delays[stage - 1] if len(arrived) > number else None

    def _backward_at(self, stage: int) -> float | None:
        number = len(self.backwards[stage])
        if number == len(self.forwards[stage]):
            return None
        if stage and number - len(self.backwards[stage - 1]) >= self.problem.credits_from[stage - 1]:
            return None
        if stage + 1 == len(self.forwards):
            return 0.0
        arrived = self.backwards[stage + 1]
        return arrived[number] + self.problem.delays[stage] if len(arrived) > number else None

    def _next_weights(self, worker: int) -> int | None:
        """Return the W of the stage with the most of them to do."""
        waiting = [(len(self.backwards[stage]) - self.weights[stage], stage) for stage in self.problem.own[worker]]
        most, stage = max(waiting)
        return token(WEIGHTS, stage) if most else None

    def _is_time_for_weights(
        self, worker: int, weights: int, free_at: float, chosen: tuple[float, tuple[bool, int], int] | None
    ) -> bool:
        if chosen is None:
            return True
        idle = chosen[0] - free_at
        if idle and idle >= self.policy.gap * self.problem.durations[weights]:
            return True
        return self.policy.frees_memory and chosen[2] & 3 == INPUTS and self._only_lacks_memory(worker, free_at)

    def _only_lacks_memory(self, worker: int, free_at: float) -> bool:
        forwards = ((stage, self._forward_at(stage)) for stage in self.problem.own[worker])
        return any(
            at is not None and at <= free_at and not self.may_stash(stage, self.policy.caps) for stage, at in forwards
        )
