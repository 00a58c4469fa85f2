import pytest
from hypothesis import given
from hypothesis import strategies as st

from lp_pipe.pipeline.schedule import Costs, make_schedule, peak_activations, simulate

seconds = st.integers(1, 5)


def test_worker_w_runs_its_weights_w_micro_batches_later() -> None:
    assert make_schedule("zb_h1", stages=3, microbatches=4).to_csv().splitlines() == [
        "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3",
        "1F0,1F1,1I0,1F2,1I1,1W0,1F3,1I2,1W1,1I3,1W2,1W3",
        "2F0,2I0,2F1,2I1,2F2,2I2,2W0,2F3,2I3,2W1,2W2,2W3",
    ]


def test_fewer_microbatches_than_stages() -> None:
    assert make_schedule("zb_h1", stages=3, microbatches=1).to_csv().splitlines() == [
        "0F0,0I0,0W0",
        "1F0,1I0,1W0",
        "2F0,2I0,2W0",
    ]


@given(p=st.integers(1, 8), more=st.integers(0, 12), f=seconds, i=seconds, w=seconds)
def test_the_bubble_is_the_papers(p: int, more: int, f: int, i: int, w: int) -> None:
    """(p - 1)(F + I - W), from a micro-batch per worker on, where W fits into the gaps."""
    m, w = p + more, min(f, i, w)
    timeline = simulate(make_schedule("zb_h1", p, m), Costs(forward=f, backward_input=i, backward_weight=w))
    assert timeline.makespan == m * (f + i + w) + (p - 1) * (f + i - w)


@given(p=st.integers(1, 8), m=st.integers(1, 20), f=seconds, i=seconds, w=seconds)
def test_it_is_never_slower_than_1f1b(p: int, m: int, f: int, i: int, w: int) -> None:
    costs = Costs(forward=f, backward_input=i, backward_weight=w)
    ours, theirs = (simulate(make_schedule(name, p, m), costs).makespan for name in ("zb_h1", "1f1b"))
    assert ours <= theirs


@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 2), (4, 8), (6, 12)])
def test_every_worker_stashes_as_much_as_1f1bs_first(p: int, m: int) -> None:
    peak = max(peak_activations(make_schedule("1f1b", p, m)))
    assert peak_activations(make_schedule("zb_h1", p, m)) == (peak,) * p
