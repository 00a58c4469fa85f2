import itertools
import re
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule import (
    Action,
    Costs,
    Schedule,
    default_chunks,
    make_schedule,
    register_schedule,
    registry,
    schedules,
    search_schedule,
    simulate,
    verify,
)


@pytest.fixture(autouse=True)
def _restore_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))


def one_by_one(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Compute each micro-batch forward and backward before the next: a pipeline that does not overlap."""
    workers = [[Action(op, s, j) for j in range(microbatches) for op in ("F", "B")] for s in range(stages)]
    return Schedule("one_by_one", tuple(map(tuple, workers)))


def test_a_function_becomes_a_schedule_that_can_be_asked_for_by_name() -> None:
    register_schedule("one_by_one")(one_by_one)
    assert "one_by_one" in schedules()
    assert make_schedule("one_by_one", 2, 2).to_csv() == "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"


def test_the_schedules_that_come_with_lp_pipe() -> None:
    assert {"1f1b", "forward", "gpipe", "interleaved", "looped_bfs", "zb_h1", "zbv", "dualpipev", "auto"} <= set(
        schedules()
    )
    assert schedules() == sorted(schedules())


def test_chunks_default_to_what_the_schedule_needs() -> None:
    assert make_schedule("1f1b", 2, 4).stages == 2
    assert make_schedule("interleaved", 2, 4).stages == make_schedule("looped_bfs", 2, 4).stages == 4
    assert make_schedule("interleaved", 2, 4, chunks=3).stages == 6


def test_an_unknown_name_is_answered_with_the_nearest_and_all_others() -> None:
    message = r"no schedule '1f1bb': did you mean '1f1b'\? There are .*gpipe, interleaved"
    with pytest.raises(ScheduleError, match=message):
        make_schedule("1f1bb", 2, 4)
    with pytest.raises(ScheduleError, match=r"no schedule 'mine'; there are 1f1b"):
        make_schedule("mine", 2, 4)


@pytest.mark.parametrize(
    ("in_torch", "here"),
    [
        ("Schedule1F1B", "1f1b"),
        ("ScheduleGPipe", "gpipe"),
        ("GPipe", "gpipe"),
        ("ScheduleInterleaved1F1B", "interleaved"),
        ("ScheduleInterleavedZeroBubble", "zb_h1"),
        ("ScheduleLoopedBFS", "looped_bfs"),
        ("ScheduleZBVZeroBubble", "zbv"),
        ("ScheduleDualPipeV", "dualpipev"),
    ],
)
def test_torchs_names_and_classes_are_answered_with_the_one_here(in_torch: str, here: str) -> None:
    for asked in (in_torch, type(in_torch, (), {})):
        with pytest.raises(ScheduleError, match=f"did you mean '{here}'"):
            make_schedule(cast(str, asked), 2, 2)


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved", "looped_bfs", "forward", "zb_h1", "zbv", "dualpipev", "auto"]
)
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 4, 1), "stages=0: .* use stages=1 or more"),
        ((2, -3, 1), "microbatches=-3: .* use microbatches=1 or more"),
        ((2, 4, 0), "chunks=0: .* use chunks=[12]"),
        ((0, 0, 2), "stages=0 and microbatches=0: .* use stages=1 or more and microbatches=1 or more"),
        ((2, 2.5, 1), "microbatches=2.5: .* whole number"),
        ((True, 4, 1), "stages=True"),
    ],
)
def test_numbers_that_do_not_work_are_named_with_those_that_do(
    name: str, sizes: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        make_schedule(name, *sizes)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_chunks_that_a_schedule_cannot_have_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=f"schedule '{name}' with chunks=2: .* use chunks=1"):
        make_schedule(name, 2, 4, chunks=2)


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_a_v_has_two_legs(name: str) -> None:
    assert default_chunks(name) == 2
    with pytest.raises(ScheduleError, match=f"schedule '{name}' with chunks=3: .* use chunks=2"):
        make_schedule(name, 2, 8, chunks=3)


@pytest.mark.parametrize("name", schedules())
def test_a_schedule_exists_or_the_error_names_numbers_for_which_it_does(name: str) -> None:
    refused = 0
    for sizes in ({"stages": p, "microbatches": m, "chunks": c} for p in (1, 2, 3) for m in (1, 2, 5) for c in (1, 2)):
        try:
            make_schedule(name, **sizes)
        except ScheduleError as error:
            refused += 1
            for changes in _advised(str(error)):
                make_schedule(name, **{**sizes, **changes})
    assert bool(refused) == (name in {"gpipe", "1f1b", "zb_h1", "zbv", "dualpipev", "pipedream", "pipedream_2bw"})


def _advised(error: str) -> Iterator[dict[str, int]]:
    """Return each option that the error advises: it names all faults at once, and may offer several numbers."""
    clauses = [re.findall(r"(?:use|or) (stages|microbatches|chunks)=(\d+)", clause) for clause in error.split("; and ")]
    assert all(clauses), error
    for chosen in itertools.product(*clauses):
        yield {what: int(number) for what, number in chosen}


def test_numpys_numbers_are_numbers() -> None:
    """Regression: they were refused as no whole numbers, and costs ended in a TypeError."""
    schedule = make_schedule("1f1b", np.int64(2), np.int32(4))  # type: ignore[arg-type]
    assert schedule == make_schedule("1f1b", 2, 4)
    verify(schedule, memory=np.int64(2))  # type: ignore[arg-type]
    costs = Costs(forward=np.float32(1), backward_input=np.ones(2), backward_weight=np.int64(1))  # type: ignore[arg-type]
    assert simulate(schedule, costs, links=np.float64(0)).makespan == 15
    assert search_schedule(np.int64(2), 4, costs) == search_schedule(
        2, 4, Costs(forward=1, backward_input=1, backward_weight=1)
    )


@pytest.mark.parametrize("seconds", [None, "a", [1, None]])
def test_costs_that_are_no_numbers_are_named(seconds: Any) -> None:
    with pytest.raises(ScheduleError, match=r"costs.forward is .*: give seconds"):
        simulate(make_schedule("1f1b", 2, 2), Costs(forward=seconds, backward_input=1, backward_weight=1))


def test_a_name_belongs_to_one_function() -> None:
    register_schedule("one_by_one")(one_by_one)
    register_schedule("one_by_one")(one_by_one)  # a notebook's cell that runs twice
    with pytest.raises(ScheduleError, match=r"'1f1b' is already .*one_f_one_b: register under another name"):
        register_schedule("1f1b")(one_by_one)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "returned NoneType: return a pp.Schedule"),
        (one_by_one(2, 3, 1), "made 2 workers and 3 micro-batches where 2 and 4 were asked for"),
        (one_by_one(3, 4, 1), "made 3 workers and 4 micro-batches where 2 and 4 were asked for"),
    ],
)
def test_a_function_that_makes_something_else_is_refused(made: Schedule, message: str) -> None:
    """Regression: one that forgot the last micro-batch trained without it."""
    register_schedule("mine")(lambda stages, microbatches, chunks: made)
    with pytest.raises(ScheduleError, match=f"schedule 'mine': its function .*{message}"):
        make_schedule("mine", 2, 4)
