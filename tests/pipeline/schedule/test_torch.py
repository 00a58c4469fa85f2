"""Our generators beside those of torch.distributed.pipelining: with equal costs none is slower than its namesake.

torch's tables come from its pure functions, on a stand-in for the schedule object: the real one wants process groups.
"""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from lp_pipe.pipeline.schedule import Costs, Schedule, make_schedule, simulate

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

Rows = Iterable[list[Any]]  # per rank torch's actions, None where idle
EQUAL = Costs(forward=1, backward_input=1, backward_weight=1)
SIZES = [(1, 1), (1, 4), (2, 2), (2, 5), (3, 3), (4, 2), (4, 4), (4, 8), (5, 11), (6, 12)]  # stages, micro-batches


def gpipe(stages: int, microbatches: int, chunks: int) -> Rows:
    table = SimpleNamespace(_num_stages=stages, _n_microbatches=microbatches)
    return list(torch_schedules.ScheduleGPipe._get_pipeline_order(table).values())


def one_f_one_b(stages: int, microbatches: int, chunks: int) -> Rows:
    table = SimpleNamespace(_num_stages=stages, _n_microbatches=microbatches)
    rows = torch_schedules.Schedule1F1B._get_pipeline_order(table).values()
    return [renumber_forwards(row) for row in rows]


def renumber_forwards(row: list[Any]) -> list[Any]:
    """torch 2.13's printed table starts the last rank at F1 and ends it at F(m), unlike what it runs."""
    actions = [action for action in row if action is not None]
    forwards = [index for index, action in enumerate(actions) if action.computation_type.value == "F"]
    for microbatch, index in enumerate(forwards):
        actions[index] = actions[index]._replace(microbatch_index=microbatch)
    return actions


def interleaved(stages: int, microbatches: int, chunks: int) -> Rows:
    rounds = max(1, microbatches // stages)
    table = SimpleNamespace(
        n_local_stages=chunks,
        pp_group_size=stages,
        _n_microbatches=microbatches,
        microbatches_per_round=microbatches // rounds,
    )
    cls = torch_schedules.ScheduleInterleaved1F1B
    return [cls._calculate_single_rank_operations(table, rank) for rank in range(stages)]


def looped_bfs(stages: int, microbatches: int, chunks: int) -> Rows:
    table = SimpleNamespace(_stages=[None] * chunks, pp_group_size=stages, _n_microbatches=microbatches)
    cls = torch_schedules.ScheduleLoopedBFS
    return [cls._calculate_single_rank_operations(table, rank) for rank in range(stages)]


def zb_h1(stages: int, microbatches: int, chunks: int) -> Rows:
    """torch's interleaved zero bubble with one stage a rank, for which the rounds do not matter."""
    table = SimpleNamespace(
        n_local_stages=1, pp_group_size=stages, _n_microbatches=microbatches, microbatches_per_round=1
    )
    cls = torch_schedules.ScheduleInterleavedZeroBubble
    return [cls._calculate_single_rank_operations(table, rank) for rank in range(stages)]


def zbv(stages: int, microbatches: int, chunks: int) -> Rows:
    table = SimpleNamespace(pp_group_size=stages, num_stages=2 * stages, _n_microbatches=microbatches)
    cls = torch_schedules.ScheduleZBVZeroBubble
    return [cls._calculate_single_rank_operations(table, rank) for rank in range(stages)]


def dualpipev(stages: int, microbatches: int, chunks: int) -> Rows:
    table = SimpleNamespace(pp_group_size=stages, _n_microbatches=microbatches)
    cls = torch_schedules.ScheduleDualPipeV
    return [cls._calculate_single_rank_operations(table, rank) for rank in range(stages)]


def as_schedule(rows: Rows) -> Schedule:
    """Go through torch's own printing of its actions, as its CSV does."""
    return Schedule.from_csv("\n".join(",".join("" if a is None else str(a) for a in row) for row in rows), "torch")


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_gpipe_is_torchs(stages: int, microbatches: int) -> None:
    assert make_schedule("gpipe", stages, microbatches).workers == as_schedule(gpipe(stages, microbatches, 1)).workers


@pytest.mark.parametrize(("stages", "microbatches"), [(p, m) for p, m in SIZES if m >= p])
def test_1f1b_is_torchs(stages: int, microbatches: int) -> None:
    """Micro-batches are as many as stages: with fewer, torch's table has forwards of some that do not exist."""
    theirs = as_schedule(one_f_one_b(stages, microbatches, 1))
    assert make_schedule("1f1b", stages, microbatches).workers == theirs.workers


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("stages", "microbatches"), [(p, m) for p, m in SIZES if m % max(1, m // p) == 0])
def test_interleaved_is_torchs_where_torch_has_one(stages: int, microbatches: int, chunks: int) -> None:
    theirs = as_schedule(interleaved(stages, microbatches, chunks))
    assert make_schedule("interleaved", stages, microbatches, chunks).workers == theirs.workers


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_looped_bfs_takes_as_long_as_torchs(stages: int, microbatches: int, chunks: int) -> None:
    """torch runs the backwards in reverse order; with equal costs that takes as long."""
    theirs = as_schedule(looped_bfs(stages, microbatches, chunks))
    ours = make_schedule("looped_bfs", stages, microbatches, chunks)
    assert simulate(ours, EQUAL).makespan == simulate(theirs, EQUAL).makespan


@pytest.mark.parametrize("generator", [zb_h1, zbv, dualpipev], ids=lambda generator: generator.__name__)
@pytest.mark.parametrize("stages", range(2, 9))
def test_zero_bubble_schedules_are_torchs(generator: Callable[[int, int, int], Rows], stages: int) -> None:
    name = generator.__name__
    for microbatches in range(2 * stages if name == "dualpipev" else 1, 4 * stages + 2):
        ours, theirs = make_schedule(name, stages, microbatches), as_schedule(generator(stages, microbatches, 2))
        assert ours.workers == theirs.workers
        assert simulate(ours, EQUAL).makespan <= simulate(theirs, EQUAL).makespan


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped_bfs", "forward", "zb_h1", "zbv", "dualpipev"])
def test_torch_reads_our_csv(name: str) -> None:
    schedule = make_schedule(name, 3, 6)
    rows = [row.split(",") for row in schedule.to_csv().splitlines()]
    parsed = {rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    if not schedule.forward_only:  # torch's check wants backwards
        owners = torch_schedules._validate_schedule(parsed, 3, schedule.stages, 6)
        assert tuple(owners[stage] for stage in range(schedule.stages)) == schedule.placement
    lowered = torch_schedules._add_send_recv(parsed, lambda stage: schedule.placement[stage], schedule.stages)
    assert as_schedule(lowered.values()).workers == schedule.workers
