import pytest

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule import Action, Costs, Schedule, Span, make_schedule, simulate

EQUAL = Costs(forward=1, backward_input=1, backward_weight=1)


def test_each_action_runs_as_soon_as_its_input_is_there() -> None:
    timeline = simulate(make_schedule("1f1b", stages=2, microbatches=2), EQUAL)
    assert [[(str(action), start, end) for action, start, end in spans] for spans in timeline.spans] == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)],
        [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7)],
    ]
    assert timeline.makespan == 9
    assert timeline.bubble == pytest.approx(1 - 12 / 18)
    assert timeline.peak_activations == (2, 1)


def test_the_input_gradient_leaves_before_the_weights_are_done() -> None:
    whole = simulate(Schedule.from_csv("0F0,0B0\n1F0,1B0"), EQUAL)
    split = simulate(Schedule.from_csv("0F0,0I0,0W0\n1F0,1I0,1W0"), EQUAL)
    assert (whole.makespan, split.makespan) == (6, 5)


def test_costs_may_differ_by_stage() -> None:
    timeline = simulate(make_schedule("forward", 2, 2), Costs(forward=[1, 5], backward_input=0, backward_weight=0))
    assert timeline.spans[1] == (Span(Action("F", 1, 0), 1, 6), Span(Action("F", 1, 1), 6, 11))


def test_links_delay_messages_both_ways_but_not_within_a_worker() -> None:
    two_workers = make_schedule("gpipe", stages=2, microbatches=1)
    one_worker = make_schedule("looped_bfs", stages=1, microbatches=1, chunks=2)
    assert simulate(two_workers, EQUAL).makespan == 6
    assert simulate(two_workers, EQUAL, links=0.5).makespan == 7
    assert simulate(one_worker, EQUAL, links=0.5).makespan == 6


def test_links_may_differ_by_pair_of_stages() -> None:
    schedule = make_schedule("forward", stages=3, microbatches=1)
    assert simulate(schedule, EQUAL, links=[10, 0]).spans[2][0].start_s == 12
    assert simulate(schedule, EQUAL, links=[0, 10]).spans[1][0].start_s == 1


def test_a_reversed_order_can_be_simulated_though_verify_refuses_it() -> None:
    reversed_backwards = Schedule.from_csv("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0")
    assert simulate(reversed_backwards, EQUAL).makespan == simulate(make_schedule("gpipe", 2, 2), EQUAL).makespan


def test_nothing_takes_no_time() -> None:
    timeline = simulate(make_schedule("1f1b", 2, 2), Costs(forward=0, backward_input=0, backward_weight=0))
    assert (timeline.makespan, timeline.bubble) == (0, 0)


@pytest.mark.parametrize(
    ("costs", "links", "message"),
    [
        (Costs(forward=[1, 1, 1], backward_input=1, backward_weight=1), None, "costs.forward has 3 numbers: .* or 2"),
        (Costs(forward=1, backward_input=1, backward_weight=-1), None, "costs.backward_weight is -1"),
        (EQUAL, {0: 0.5}, r"links is \{0: 0.5\}: give seconds"),  # its keys were taken
        (Costs(forward=float("nan"), backward_input=1, backward_weight=1), None, "costs.forward is nan"),
        (EQUAL, [1, 1], "links has 2 numbers: give one number, or 1"),
    ],
)
def test_wrong_numbers_are_named(costs: Costs, links: list[float] | None, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(make_schedule("1f1b", 2, 2), costs, links)


@pytest.mark.parametrize(
    ("text", "message"), [("0F0,0B0\n1F0", "1B0: is missing"), ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "deadlock")]
)
def test_a_schedule_that_cannot_run_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(Schedule.from_csv(text), EQUAL)
