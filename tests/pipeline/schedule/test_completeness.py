import pytest

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule import Action, Schedule, make_schedule
from lp_pipe.pipeline.schedule.completeness import check_complete


def test_each_stage_runs_each_micro_batch_once() -> None:
    check_complete(make_schedule("1f1b", 3, 5))
    check_complete(make_schedule("forward", 3, 5))
    check_complete(Schedule.from_csv("0F0,0F1,0I0,0B1,0W0"))  # full and split backwards may be mixed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", "worker 0, position 3, action 0B1: is missing"),
        ("0F0,0B0\n1F0,1B0,1F1,1B1", "worker 0, position 2, action 0F1: is missing"),
        ("0F0,0I0\n1F0,1B0", "worker 0, position 2, action 0W0: is missing"),
        ("0F0,0F1,0F0,0B0,0B1", "worker 0, position 2, action 0F0: 0F0 has run already"),
        ("0F0,0B0,0B0", "worker 0, position 2, action 0B0: 0B0 has run already"),
        ("0F0,0B0,0F0", "worker 0, position 2, action 0F0: 0B0 has run already"),
        ("0F0,0B0,0W0", "worker 0, position 2, action 0W0: 0B0 has run already"),
        ("0F0,0I0,0B0", "worker 0, position 2, action 0B0: 0I0 has run already"),
        ("0F0,0B0\n1B0,1F0", "worker 1, position 0, action 1B0: 1F0 has not run yet"),
        ("0F0,0W0,0I0", "worker 0, position 1, action 0W0: 0I0 has not run yet: run F, then B or I and W"),
        ("0F0,0B0,0F1\n1F0,1B0,1F11,1B1", "worker 1, position 3, action 1B1: 1F1 has not run yet"),
        (
            "0F0,0F1,0B0,0B1\n1F0,1B0,1F11,1B11",
            "0F2: is missing: add it .there are 12 micro-batches, since worker 1 has 1F11",
        ),
        ("", "has no actions"),
        ("0F0,0B0\n\n1F0,1B0", "worker 1 has no actions: leave out its line"),
    ],
)
def test_the_first_offending_action_is_named(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_complete(Schedule.from_csv(text))


@pytest.mark.parametrize("action", [Action("F", 0, -1), Action("X", 0, 0)])  # type: ignore[arg-type]
def test_an_action_that_does_not_exist_is_refused(action: Action) -> None:
    with pytest.raises(ScheduleError, match="there is no such action"):
        check_complete(Schedule("mine", ((action,),)))


def test_a_huge_micro_batch_number_is_refused_at_once() -> None:
    with pytest.raises(ScheduleError, match="action 0F1: is missing"):
        check_complete(Schedule.from_csv("0F0,0B0,0F99999999999,0B99999999999"))
