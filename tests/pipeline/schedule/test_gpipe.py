import pytest

from lp_pipe.pipeline.schedule import Costs, make_schedule, simulate


def test_gpipe_runs_all_forwards_then_all_backwards_in_index_order() -> None:
    assert make_schedule("gpipe", stages=3, microbatches=4).to_csv().splitlines() == [
        "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3",
        "1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3",
        "2F0,2F1,2F2,2F3,2B0,2B1,2B2,2B3",
    ]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (4, 2), (4, 8), (6, 5)])  # stages, micro-batches
def test_the_bubble_is_the_papers(p: int, m: int) -> None:
    costs = Costs(forward=0.5, backward_input=1, backward_weight=0.25)
    assert simulate(make_schedule("gpipe", p, m), costs).bubble == pytest.approx((p - 1) / (m + p - 1))
