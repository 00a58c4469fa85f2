"""Stages with several replicas: micro-batch j of a step runs on replica j mod r of a stage that has r."""

from collections.abc import Sequence
from dataclasses import replace

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.ir import Action, Schedule
from lp_pipe.pipeline.schedule.one_f_one_b import alternate
from lp_pipe.pipeline.schedule.registry import make_schedule
from lp_pipe.pipeline.schedule.updates import in_flight


def replicated(name: str, replicas: Sequence[int], microbatches: int, chunks: int | None = None) -> Schedule:
    """Return the schedule of that name where worker w stands for `replicas[w]` replicas.

    Each replica runs its `share` of the worker's actions. The replicas of a stage follow each other closely, so that
    each does what the one worker would do alone:

        1f1b, 2 stages of 2 replicas    worker 0 |F0 F1 F2 F3 B0 B1 ...
                                   its replica 1 |   F1    F3    B1 ...   as F0 F1 B0 of a stage without replicas

    Where all stages have as many, they are as many pipelines side by side. Else "1f1b" and the asynchronous schedules
    start with as many micro-batches as keep all replicas behind a stage busy (`in_flight`), and others stay as they
    are. A share can run wherever the whole can: a message has a channel of its two replicas, and leaving out the other
    replicas' actions makes no replica wait for more.

    Raises:
        ScheduleError: there is no such schedule for these numbers.
    """
    stages, most = len(replicas), max(replicas, default=1)
    if len(set(replicas)) <= 1:
        return _side_by_side(_of_each(name, stages, microbatches, chunks, most), most, microbatches)
    made = make_schedule(name, stages, microbatches, chunks)
    return _round_robin(made, replicas) if name == "1f1b" or made.updates is not None else made


def share(actions: Sequence[Action], replicas: int, replica: int) -> tuple[Action, ...]:
    """Return what one replica runs of a worker's actions."""
    return tuple(action for action in actions if action.microbatch % replicas == replica)


def _of_each(name: str, stages: int, microbatches: int, chunks: int | None, replicas: int) -> Schedule:
    try:
        return make_schedule(name, stages, -(-microbatches // replicas), chunks)
    except ScheduleError as error:
        if replicas == 1:
            raise
        shared = f"for each of {replicas} replicas, which share microbatches={microbatches}"
        raise ScheduleError(f"{error} ({shared})") from error


def _side_by_side(schedule: Schedule, replicas: int, microbatches: int) -> Schedule:
    if replicas == 1:
        return schedule
    every = range(replicas)
    workers = (
        tuple(Action(op, stage, index * replicas + replica) for op, stage, index in actions for replica in every)
        for actions in schedule.workers
    )
    return replace(schedule, workers=tuple(workers)).first_microbatches(microbatches)


def _round_robin(schedule: Schedule, replicas: Sequence[int]) -> Schedule:
    workers = []
    for stage, count in enumerate(in_flight(replicas)):
        forwards = [Action("F", stage, microbatch) for microbatch in range(schedule.microbatches)]
        backwards = [Action("B", stage, microbatch) for microbatch in range(schedule.microbatches)]
        workers.append(alternate(forwards, backwards, warmup=min(count, schedule.microbatches) - 1))
    return replace(schedule, workers=tuple(workers))
