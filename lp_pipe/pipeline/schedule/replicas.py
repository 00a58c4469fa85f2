"""Stages with several replicas: micro-batch j of a step runs on replica j mod r of a stage that has r."""

from collections.abc import Sequence
from itertools import accumulate

from lp_pipe.pipeline.schedule.ir import Action, Schedule
from lp_pipe.pipeline.schedule.one_f_one_b import alternate
from lp_pipe.pipeline.schedule.registry import make_schedule


def replicated(name: str, replicas: Sequence[int], microbatches: int, chunks: int | None = None) -> Schedule:
    """The schedule of that name where worker w stands for `replicas[w]` replicas; each runs its `share` of the actions.

    The replicas of a stage follow each other closely, so that each does what the one worker would do alone:

        1f1b, 2 stages of 2 replicas    worker 0 |F0 F1 F2 F3 B0 B1 ...
                                   its replica 1 |   F1    F3    B1 ...   as F0 F1 B0 of a stage without replicas

    Where all stages have as many, they are as many pipelines side by side. Else "1f1b" starts with as many
    micro-batches as keep all replicas behind a stage busy (PipeDream, Narayanan et al., 2019, section 3.2: NOAM,
    1F1B-RR), and other schedules stay as they are. A share can run wherever the whole can: a message has a channel of
    its two replicas, and leaving out the others' actions makes nobody wait for more.

    Raises:
        ScheduleError: there is no such schedule for these numbers.
    """
    stages, most = len(replicas), max(replicas, default=1)
    if len(set(replicas)) <= 1:
        return _side_by_side(make_schedule(name, stages, -(-microbatches // most), chunks), most, microbatches)
    made = make_schedule(name, stages, microbatches, chunks)
    return _round_robin(replicas, microbatches) if name == "1f1b" else made


def share(actions: Sequence[Action], replicas: int, replica: int) -> tuple[Action, ...]:
    """What one replica runs of a worker's actions."""
    return tuple(action for action in actions if action.microbatch % replicas == replica)


def _side_by_side(schedule: Schedule, replicas: int, microbatches: int) -> Schedule:
    if replicas == 1:
        return schedule
    every = range(replicas)
    workers = (
        tuple(Action(op, stage, index * replicas + replica) for op, stage, index in actions for replica in every)
        for actions in schedule.workers
    )
    return Schedule(schedule.name, tuple(workers)).first_microbatches(microbatches)


def _round_robin(replicas: Sequence[int], microbatches: int) -> Schedule:
    behind = list(accumulate(reversed(replicas)))[::-1]  # replicas of a stage and of all after it
    wanted = [-(-total // own) * own for total, own in zip(behind, replicas, strict=True)]
    # A stage that waited for more than the one before it sends would wait for ever.
    in_flight = accumulate(wanted, min)
    workers = []
    for stage, count in enumerate(in_flight):
        forwards = [Action("F", stage, microbatch) for microbatch in range(microbatches)]
        backwards = [Action("B", stage, microbatch) for microbatch in range(microbatches)]
        workers.append(alternate(forwards, backwards, warmup=min(count, microbatches) - 1))
    return Schedule("1f1b", tuple(workers))
