import pytest

from lp_pipe.pipeline.schedule import Costs, make_schedule, peak_activations, simulate

EQUAL = Costs(forward=1, backward_input=1, backward_weight=1)


def test_each_worker_has_a_stage_on_the_way_down_and_one_on_the_way_up() -> None:
    schedule = make_schedule("zbv", stages=2, microbatches=3)
    assert schedule.placement == (0, 1, 1, 0)
    assert schedule.to_csv().splitlines() == [
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,3F2,3I2,3W2,0I1,0W1,0I2,0W2",
        "1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1I1,2I2,1I2,1W1,2W2,1W2",
    ]


def test_one_micro_batch_goes_down_and_up_and_back() -> None:
    assert make_schedule("zbv", stages=2, microbatches=1).to_csv().splitlines() == [
        "0F0,3F0,3I0,3W0,0I0,0W0",
        "1F0,2F0,2I0,2W0,1I0,1W0",
    ]


@pytest.mark.parametrize("p", range(1, 9))
def test_only_filling_the_pipeline_leaves_a_bubble(p: int) -> None:
    """Near zero with many micro-batches: p - 1 seconds, once, from 2p - 1 micro-batches on."""
    for m in range(2 * p - 1, 4 * p + 2):
        assert simulate(make_schedule("zbv", p, m), EQUAL).makespan == 6 * m + p - 1
    assert simulate(make_schedule("zbv", p, 100 * p), EQUAL).bubble < 0.002


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 8), (4, 8), (6, 12)])
def test_it_stashes_no_more_than_1f1b(p: int, m: int) -> None:
    """The stages are half as large, so twice as many activations are allowed."""
    assert max(peak_activations(make_schedule("zbv", p, m))) <= 2 * max(peak_activations(make_schedule("1f1b", p, m)))


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_it_is_faster_than_zb_h1(p: int) -> None:
    halves = Costs(forward=0.5, backward_input=0.5, backward_weight=0.5)
    for m in range(2 * p - 1, 4 * p):
        assert (
            simulate(make_schedule("zbv", p, m), halves).makespan
            < simulate(make_schedule("zb_h1", p, m), EQUAL).makespan
        )
