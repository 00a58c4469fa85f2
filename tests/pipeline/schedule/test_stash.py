import pytest

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule import Schedule, make_schedule, peak_activations
from lp_pipe.pipeline.schedule.stash import check_memory


def test_peak_activations_of_the_basic_schedules() -> None:
    assert peak_activations(make_schedule("gpipe", 3, 8)) == (8, 8, 8)
    assert peak_activations(make_schedule("1f1b", 3, 8)) == (3, 2, 1)
    assert peak_activations(make_schedule("forward", 3, 8)) == (0, 0, 0)


def test_an_activation_stays_until_the_weights_gradient_is_done() -> None:
    assert peak_activations(Schedule.from_csv("0F0,0I0,0F1,0I1,0W0,0W1")) == (2,)
    assert peak_activations(Schedule.from_csv("0F0,0B0,0F1,0B1")) == (1,)


@pytest.mark.parametrize("memory", [3, [3, 2, 1], (3, 3, 3)])
def test_a_schedule_that_fits(memory: int | list[int]) -> None:
    check_memory(make_schedule("1f1b", 3, 8), memory)


def test_the_first_forward_too_many_is_named() -> None:
    message = "worker 1, position 1, action 1F1: stashes activation 2, the limit is 1: the schedule needs 2 here"
    with pytest.raises(ScheduleError, match=message):
        check_memory(make_schedule("1f1b", 3, 8), [3, 1, 1])


def test_one_limit_or_one_per_worker() -> None:
    with pytest.raises(ScheduleError, match="memory has 2 limits: give one number, or 3"):
        check_memory(make_schedule("1f1b", 3, 8), [3, 2])
