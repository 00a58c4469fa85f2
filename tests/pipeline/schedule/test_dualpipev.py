import pytest

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule import Costs, make_schedule, peak_activations, simulate

EQUAL = Costs(forward=1, backward_input=1, backward_weight=1)


def test_backwards_are_whole_but_at_the_ends() -> None:
    schedule = make_schedule("dualpipev", stages=2, microbatches=4)
    assert schedule.placement == (0, 1, 1, 0)
    assert schedule.to_csv().splitlines() == [
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,0F3,3B1,3F2,0B0,3B2,3F3,0B1,3B3,0I2,0W2,0I3,0W3",
        "1F0,2F0,1F1,2F1,1F2,2B0,2F2,1B0,1F3,2B1,2F3,1B1,2B2,1B2,2I3,1I3,2W3,1W3",
    ]


@pytest.mark.parametrize("p", range(1, 9))
def test_with_equal_costs_it_is_as_fast_as_zbv_with_one_activation_more(p: int) -> None:
    for m in range(2 * p, 4 * p + 2):
        ours, zbv = (make_schedule(name, p, m) for name in ("dualpipev", "zbv"))
        assert simulate(ours, EQUAL).makespan == simulate(zbv, EQUAL).makespan
        assert max(peak_activations(ours)) <= 2 * p + 1


@pytest.mark.parametrize(
    ("stages", "microbatches", "message"),
    [
        (4, 7, "stages=4 and microbatches=7: .* use microbatches=8 or more, or stages=3 or fewer"),
        (2, 1, "stages=2 and microbatches=1: .* use microbatches=4 or more$"),
    ],
)
def test_too_few_micro_batches_are_refused_with_numbers_that_work(stages: int, microbatches: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make_schedule("dualpipev", stages, microbatches)
