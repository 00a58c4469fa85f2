import re
from typing import Any

import pytest

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule import Costs, Schedule, make_schedule, simulate, verify

ZB_H1 = """
0F0,0F1,0I0,0W0,0I1,0W1
1F0,1I0,1F1,1I1,1W0,1W1
"""


def test_a_sound_schedule_passes() -> None:
    verify(make_schedule("1f1b", stages=4, microbatches=8), credits=1, memory=[4, 3, 2, 1])
    verify(Schedule.from_csv(ZB_H1.strip()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0", "worker 1, position 1, action 1B0: is missing"),
        ("0F0,0B0\n1F0,1B0,0F1", "worker 1, position 2, action 0F1: stage 0 already belongs to worker 0"),
        ("0F0,0B0,1F1\n1F0,1B0,1B1", "worker 0, position 2, action 1F1: stage 1 already belongs to worker 1"),
        ("0F1,0F0,0B0,0B1", "worker 0, position 0, action 0F1: runs before micro-batch 0: order each stage's fo"),
        (
            "0F0,0F1,0B1,0B0",
            "worker 0, position 2, action 0B1: runs before micro-batch 0: order each stage's gr",
        ),
        ("0F0,0F1,0I0,0I1,0W1,0W0", "worker 0, position 4, action 0W1: runs before micro-batch 0"),
        ("0F0,0F1,0I0,0B1,0W0", "worker 0, position 3, action 0B1: runs before micro-batch 0"),
        ("0F0,0B0\n1B0,1F0", "worker 1, position 0, action 1B0: 1F0 has not run yet"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "deadlock: worker 0, position 1, action 0B0 waits for 1B0 of worker 1"),
    ],
)
def test_the_first_offending_action_is_named(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(Schedule.from_csv(text))


def test_receives_come_in_the_order_of_sends() -> None:
    """Input gradients may run in any order (only the weights' are summed), but both ends have to agree on it."""
    verify(Schedule.from_csv("0F0,0F1,0I1,0I0,0W0,0W1\n1F0,1F1,1I1,1I0,1W0,1W1"))
    swapped = Schedule.from_csv("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1F1,1I1,1I0,1W0,1W1")
    message = "worker 0, position 2, action 0I0: worker 1 sends micro-batch 1 of stage 1 first"
    with pytest.raises(ScheduleError, match=message):
        verify(swapped)


def test_within_a_worker_there_is_no_order_to_agree_on() -> None:
    verify(Schedule.from_csv("0F0,1F0,0F1,1F1,1I1,1I0,0I0,0I1,1W0,1W1,0W0,0W1"))


def test_credits_below_one_are_refused() -> None:
    with pytest.raises(ScheduleError, match="credits=0: nothing can be sent: use 1 or more"):
        verify(make_schedule("1f1b", 2, 2), credits=0)


@pytest.mark.parametrize("credits", [1.5, -1, True, "4"], ids=repr)
def test_credits_that_are_no_number_of_messages_are_refused(credits: Any) -> None:
    with pytest.raises(ScheduleError, match=re.escape(f"credits={credits!r}: give a whole number of at least 1")):
        verify(make_schedule("1f1b", 2, 2), credits=credits)


def test_too_few_credits_are_a_deadlock() -> None:
    schedule = make_schedule("looped_bfs", stages=2, microbatches=8)
    verify(schedule, credits=4)
    with pytest.raises(ScheduleError, match="deadlock: worker 0, position 7, action 0F7 cannot send"):
        verify(schedule, credits=3)


def test_a_schedule_that_does_not_fit_in_memory_is_refused() -> None:
    with pytest.raises(ScheduleError, match="worker 0, position 4, action 0F4: stashes activation 5, the limit is 4"):
        verify(make_schedule("gpipe", stages=2, microbatches=8), memory=4)


@pytest.mark.slow
def test_512_stages_and_2048_micro_batches_are_proved_and_simulated() -> None:
    p, m = 512, 2048  # stages, micro-batches: two million actions
    schedule = make_schedule("1f1b", p, m)
    verify(schedule, credits=2, memory=p)
    timeline = simulate(schedule, Costs(forward=1, backward_input=1, backward_weight=1))
    assert timeline.makespan == 3 * (m + p - 1)
    assert timeline.peak_activations == tuple(range(p, 0, -1))
