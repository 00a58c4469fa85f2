"""The number of activations that wait on a worker for their backward."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.ir import Action, Schedule, location
from lp_pipe.pipeline.schedule.numbers_given import as_int

# Weights' gradients need the stage's input, so that I alone frees nothing.
_CHANGE = {"F": 1, "B": -1, "I": 0, "W": -1}


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Return the most activations that each worker stashes at a time, counted in (stage, micro-batch) pairs.

    A forward-only schedule stashes none.
    """
    if schedule.forward_only:
        return (0,) * len(schedule.workers)
    return tuple(max(_stash_sizes(actions), default=0) for actions in schedule.workers)


def check_memory(schedule: Schedule, memory: int | Sequence[int]) -> None:
    """Refuse a schedule that stashes more than `memory` activations on a worker (one limit, or one per worker).

    Raises:
        ScheduleError: names the first forward that is too much, or the number of limits is wrong.
    """
    limits = limits_by_worker(schedule.name, memory, len(schedule.workers))
    for worker, (limit, peak) in enumerate(zip(limits, peak_activations(schedule), strict=True)):
        if peak > limit:
            actions = schedule.workers[worker]
            position = next(index for index, size in enumerate(_stash_sizes(actions)) if size > limit)
            raise ScheduleError(
                f"schedule {schedule.name!r}: {location(worker, position, actions[position])}: stashes activation "
                f"{limit + 1}, the limit is {limit}: the schedule needs {peak} here"
            )


def limits_by_worker(name: str, memory: int | Sequence[int], workers: int) -> Sequence[int]:
    """Return one limit for each worker.

    Raises:
        ScheduleError: there is another number of them, or one is negative or no whole number.
    """
    given: Any = as_int(memory)
    limits = [as_int(limit) for limit in ([given] * workers if isinstance(given, int | float) else given)]
    if any(not isinstance(limit, int) or limit < 0 for limit in limits):
        raise ScheduleError(f"schedule {name!r}: memory={memory!r}: must be whole numbers of activations, at least 0")
    if len(limits) != workers:
        raise ScheduleError(
            f"schedule {name!r}: memory has {len(limits)} limits: give one number, or {workers}, one per worker"
        )
    return limits


def _stash_sizes(actions: Sequence[Action]) -> Iterator[int]:
    return accumulate(_CHANGE[action.op] for action in actions)
