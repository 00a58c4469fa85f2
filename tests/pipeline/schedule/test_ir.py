import dataclasses
import pickle
from pathlib import Path

import pytest

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule import Action, Schedule, make_schedule, verify

# What torch 2.13 writes: its Interleaved1F1B table (2 ranks, 2 stages each, 2 micro-batches) through csv.writer, as
# `_dump_csv` does for compute_only. Empty cells are idle.
TORCH_COMPUTE_ONLY = (
    "0F0,0F1,2F0,2F1,,,,2B0,,2B1,,0B0,,0B1\r\n"  # rank 0
    ",1F0,1F1,,3F0,3B0,3F1,3B1,,1B0,,1B1\r\n"
)

# GPipe (2 ranks, 1 micro-batch) after torch's lowering to compute_comms, with the waits of 2.15.
TORCH_COMPUTE_COMMS = (
    "0UNSHARD,0F0,0SEND_F0,0WAIT_SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\r\n"  # rank 0
    "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD\r\n"
)


def test_a_schedule_is_a_list_of_actions_per_worker() -> None:
    schedule = Schedule("mine", ((Action("F", 0, 0), Action("B", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0))))
    assert schedule.stages == 2
    assert schedule.microbatches == 1
    assert schedule.placement == (0, 1)
    assert not schedule.forward_only
    assert [str(action) for action in schedule.workers[1]] == ["1F0", "1B0"]


def test_lists_of_actions_become_tuples() -> None:
    schedule = Schedule("mine", [[Action("F", 0, 0)]])  # type: ignore[arg-type]
    assert schedule.workers == ((Action("F", 0, 0),),)


@pytest.mark.parametrize("action", [("F", 0, 0), "0F0", ["F", 0, 0], None], ids=str)
def test_what_is_no_action_is_refused_with_what_one_is(action: object) -> None:
    # A tuple was an AttributeError, from wherever the schedule was used first.
    message = r"worker 1, position 1: .* is not an Action: .* such as pp.Action\('F', 0, 3\)"
    with pytest.raises(ScheduleError, match=message):
        Schedule("mine", [[Action("F", 0, 0)], [Action("F", 1, 0), action]])  # type: ignore[arg-type]


def test_schedules_compare_pickle_and_can_be_varied() -> None:
    schedule = make_schedule("1f1b", 3, 4)
    assert schedule.placement == (0, 1, 2)  # what is derived is kept, and must not matter
    assert schedule == make_schedule("1f1b", 3, 4) == pickle.loads(pickle.dumps(schedule))
    assert dataclasses.replace(schedule, workers=schedule.workers[:2]).placement == (0, 1)


def test_a_stage_on_two_workers_is_refused_where_it_appears_again() -> None:
    schedule = Schedule.from_csv("0F0,0B0\n1F0,0F1,1B0")
    with pytest.raises(ScheduleError, match="worker 1, position 1, action 0F1: stage 0 already belongs to worker 0"):
        _ = schedule.placement


def test_a_stage_without_worker_is_refused() -> None:
    with pytest.raises(ScheduleError, match="worker 1, position 0, action 9000000000F0: there is no stage 9000000000"):
        _ = Schedule.from_csv("0F0\n9000000000F0").stages


def test_the_first_micro_batches_keep_their_order() -> None:
    few = make_schedule("dualpipev", 2, 4).first_microbatches(2)
    assert (few.name, few.microbatches) == ("dualpipev", 2)
    assert few.to_csv().splitlines()[0] == "0F0,0F1,3F0,3I0,3W0,3F1,3B1,0B0,0B1"
    verify(few, credits=1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped_bfs", "forward", "zb_h1", "zbv", "dualpipev"])
def test_csv_round_trip(name: str) -> None:
    schedule = make_schedule(name, 3, 6)
    assert Schedule.from_csv(schedule.to_csv(), name=name) == schedule


def test_csv_in_a_file(tmp_path: Path) -> None:
    schedule = make_schedule("zb_h1", 3, 6)
    text = schedule.to_csv(tmp_path / "mine.csv")
    for source in (tmp_path / "mine.csv", str(tmp_path / "mine.csv"), text):
        assert Schedule.from_csv(source).workers == schedule.workers
    assert Schedule.from_csv(tmp_path / "mine.csv").name == "mine"
    with pytest.raises(ScheduleError, match=r"cannot read .*yours.csv: No such file"):
        Schedule.from_csv(tmp_path / "yours.csv")


def test_csv_is_a_line_per_worker() -> None:
    assert make_schedule("1f1b", 2, 2).to_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_torch_csv_is_read_without_its_idle_cells() -> None:
    assert Schedule.from_csv(TORCH_COMPUTE_ONLY, "interleaved") == make_schedule("interleaved", 2, 2)


def test_torch_communication_is_skipped() -> None:
    assert Schedule.from_csv(TORCH_COMPUTE_COMMS).to_csv() == "0F0,0B0\n1F0,1B0\n"


def test_an_overlapped_pair_of_torch_becomes_two_actions() -> None:
    assert Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1").to_csv() == "0F0,0F1,0B0,0B1\n"


def test_a_bad_cell_is_named() -> None:
    with pytest.raises(ScheduleError, match="line 2, cell 3: '1X0' is not an action"):
        Schedule.from_csv("0F0,0B0\n1F0,,1X0")


@pytest.mark.parametrize("text", ["", "\n\n", ",,\n"])
def test_an_empty_file_is_named(text: str, tmp_path: Path) -> None:
    """add_pipeline said of it "use microbatches=0"."""
    path = tmp_path / "empty.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=r"empty\.csv: the schedule has no actions: write a line for each worker"):
        Schedule.from_csv(path)
