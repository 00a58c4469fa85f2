import pytest

from lp_pipe.pipeline.schedule import Costs, make_schedule, peak_activations, simulate


def test_1f1b_alternates_after_a_warmup_that_shrinks_towards_the_last_stage() -> None:
    assert make_schedule("1f1b", stages=3, microbatches=4).to_csv().splitlines() == [
        "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3",
        "1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3",
        "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3",
    ]


def test_fewer_microbatches_than_stages() -> None:
    assert make_schedule("1f1b", stages=4, microbatches=2).to_csv().splitlines() == [
        "0F0,0F1,0B0,0B1",
        "1F0,1F1,1B0,1B1",
        "2F0,2F1,2B0,2B1",
        "3F0,3B0,3F1,3B1",
    ]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (4, 2), (4, 8), (6, 12)])
def test_stage_s_stashes_at_most_stages_minus_s(stages: int, microbatches: int) -> None:
    expected = tuple(min(microbatches, stages - stage) for stage in range(stages))
    assert peak_activations(make_schedule("1f1b", stages, microbatches)) == expected


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (4, 8), (6, 5)])
def test_1f1b_is_as_fast_as_gpipe(stages: int, microbatches: int) -> None:
    costs = Costs(forward=1, backward_input=1, backward_weight=1)
    times = {name: simulate(make_schedule(name, stages, microbatches), costs).makespan for name in ("1f1b", "gpipe")}
    assert times["1f1b"] == times["gpipe"]
