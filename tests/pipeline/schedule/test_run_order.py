import pytest

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule import Schedule, make_schedule
from lp_pipe.pipeline.schedule.channels import ScheduleEdge
from lp_pipe.pipeline.schedule.run_order import run_order


def test_every_action_comes_after_what_it_needs() -> None:
    schedule = make_schedule("1f1b", stages=2, microbatches=2)
    assert " ".join(str(action) for _, action in run_order(schedule)) == "0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1"


def test_a_deadlock_names_who_waits_for_whom() -> None:
    schedule = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    with pytest.raises(ScheduleError) as caught:
        list(run_order(schedule))
    assert str(caught.value) == (
        "schedule 'csv': deadlock: worker 0, position 1, action 0B0 waits for 1B0 of worker 1; "
        "worker 1, position 1, action 1F1 waits for 0F1 of worker 0: reorder the actions"
    )


def test_workers_that_only_wait_for_the_deadlock_are_left_out() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B0,2B1")
    message = "deadlock: worker 1, position 1, action 1B0 waits for 2B0 of worker 2; worker 2, position 1"
    with pytest.raises(ScheduleError, match=message):
        list(run_order(schedule))


def test_a_worker_may_wait_for_itself() -> None:
    with pytest.raises(ScheduleError, match="worker 0, position 0, action 1F0 waits for 0F0 of worker 0: reorder"):
        list(run_order(Schedule.from_csv("1F0,0F0,1B0,0B0")))


def test_a_send_waits_for_the_receiver_when_the_channel_is_full() -> None:
    """Let both workers fill the other's channel before they empty their own; one message more would fit."""
    schedule = make_schedule("looped_bfs", stages=2, microbatches=4)
    assert len(list(run_order(schedule, credits=2))) == 32
    with pytest.raises(ScheduleError) as caught:
        list(run_order(schedule, credits=1))
    assert str(caught.value) == (
        "schedule 'looped_bfs': deadlock: "
        "worker 0, position 3, action 0F3 cannot send until worker 1 receives an earlier message of stage 0; "
        "worker 1, position 1, action 1F1 cannot send until worker 0 receives an earlier message of stage 1: "
        "reorder the actions, or allow more than 1 message(s) on an edge"
    )


def test_messages_within_a_worker_need_no_credits() -> None:
    schedule = make_schedule("looped_bfs", stages=1, microbatches=8, chunks=3)
    assert len(list(run_order(schedule, credits=1))) == 48


def test_a_stage_waits_for_what_an_edge_brings() -> None:
    """Worker 0 defers the weights of stage 0, which wait for those of stage 1: here worker 1 is in a ring with it."""
    schedule = Schedule.from_csv("0F0,0I0,0W0,0F1,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1")
    assert len(list(run_order(schedule))) == 12
    with pytest.raises(ScheduleError) as caught:
        list(run_order(schedule, edges=[ScheduleEdge("tied gradient", 1, 0, ("0.weight",))]))
    assert str(caught.value) == (
        "schedule 'csv': deadlock: worker 0, position 2, action 0W0 waits for 1B0 of worker 1; "
        "worker 1, position 2, action 1F1 waits for 0F1 of worker 0: reorder the actions"
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_edges_that_jump_over_stages_never_fill_up_first(name: str) -> None:
    schedule = make_schedule(name, stages=4, microbatches=12)
    ends = [(first, last) for first in range(4) for last in range(first + 1, 4)]
    edges = [ScheduleEdge("value", *pair, ("a",)) for pair in ends]
    edges += [ScheduleEdge("value gradient", *reversed(pair), ("a",)) for pair in ends]
    assert len(list(run_order(schedule, credits=12, edges=edges))) == len(list(run_order(schedule, credits=12)))
    assert len(list(run_order(schedule, credits=4, edges=edges))) == len(list(run_order(schedule, credits=4)))
