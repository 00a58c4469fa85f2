"""The check that every stage runs every micro-batch once, forward before backward."""

from collections.abc import Iterator
from itertools import islice

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.ir import Action, Op, Schedule, location

# What a stage has last done with a micro-batch (None: nothing) -> what it may do next.
_NEXT: dict[Op | None, tuple[Op, ...]] = {None: ("F",), "F": ("B", "I"), "I": ("W",), "B": (), "W": ()}

_States = dict[tuple[int, int], Op]  # (stage, micro-batch) -> what has last been done


def check_complete(schedule: Schedule) -> None:
    """Refuse a schedule with missing, repeated or unknown actions.

    Every worker has actions. Each (stage, micro-batch) has one F, then (unless all is forward) one B, or one I and
    later one W.

    Raises:
        ScheduleError: names the first such action.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"schedule={schedule!r}: give a pp.Schedule, such as pp.make_schedule('1f1b', stages=4, microbatches=8)"
        )
    if not schedule.placement:
        raise ScheduleError(f"schedule {schedule.name!r} has no actions")
    for worker, actions in enumerate(schedule.workers):
        if not actions:
            raise ScheduleError(f"schedule {schedule.name!r}: worker {worker} has no actions: leave out its line")
    # Report wrong actions before missing ones: a slip of the pen makes another action seem to be missing.
    missing = [action for worker in range(len(schedule.workers)) for action in _first_missing(schedule, worker)]
    if missing:
        worker = schedule.placement[missing[0].stage]
        why = f" ({_largest(schedule)})" if missing[0].op == "F" else ""
        at = location(worker, len(schedule.workers[worker]), missing[0])
        raise ScheduleError(f"schedule {schedule.name!r}: {at}: is missing: add it{why}")


def _first_missing(schedule: Schedule, worker: int) -> Iterator[Action]:
    """Yield one missing action at most. The states are not kept, since there are millions."""
    return islice(_missing(schedule, worker, _replay(schedule, worker)), 1)


def _replay(schedule: Schedule, worker: int) -> _States:
    states: _States = {}
    for position, action in enumerate(schedule.workers[worker]):
        key = action.stage, action.microbatch
        last = states.get(key)
        if action.op not in _NEXT[last] or action.microbatch < 0:
            raise ScheduleError(
                f"schedule {schedule.name!r}: {location(worker, position, action)}: "
                f"{_before(action, last)}: run F, then B or I and W, once each"
            )
        states[key] = action.op
    return states


def _before(action: Action, last: Op | None) -> str:
    if action.op not in _NEXT or action.microbatch < 0:
        return "there is no such action"
    if last == "F" and action.op == "W":
        return f"{action._replace(op='I')} has not run yet"
    if last is None:
        return f"{action._replace(op='F')} has not run yet"
    return f"{action._replace(op=last)} has run already"


def _largest(schedule: Schedule) -> str:
    """Say how many micro-batches there are, and in which action: that number may be what is wrong."""
    count = schedule.microbatches
    for worker, actions in enumerate(schedule.workers):
        for action in actions:
            if action.microbatch == count - 1:
                return f"there are {count} micro-batches, since worker {worker} has {action}"
    raise AssertionError("some action has the largest number")


def _missing(schedule: Schedule, worker: int, states: _States) -> Iterator[Action]:
    own = (stage for stage, owner in enumerate(schedule.placement) if owner == worker)
    for stage in own:
        for microbatch in range(schedule.microbatches):
            last = states.get((stage, microbatch))
            if _NEXT[last] and not (schedule.forward_only and last == "F"):
                yield Action(_NEXT[last][0], stage, microbatch)
