import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.partitioning.step_time import StageTiming, step_seconds

seconds = st.integers(0, 5).map(float)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=4), st.integers(1, 6), st.data())
def test_without_replicas_a_step_takes_what_the_simulation_says(
    stages: list[tuple[float, float, float]], microbatches: int, data: st.DataObject
) -> None:
    schedule = data.draw(st.sampled_from(["1f1b", "gpipe"]))
    costs = pp.Costs(
        forward=[forward for forward, _, _ in stages],
        backward_input=[backward for _, backward, _ in stages],
        backward_weight=0.0,
    )
    made = pp.make_schedule(schedule, len(stages), microbatches)
    expected = pp.simulate(made, costs, [link for _, _, link in stages[1:]]).makespan
    timings = [StageTiming(forward, backward, 1, link, 0.0) for forward, backward, link in stages]
    assert step_seconds(schedule, timings, microbatches) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_replicas_are_pipelines_side_by_side_that_exchange_once(schedule: str) -> None:
    timings = [StageTiming(1.0, 2.0, 2, 0.5, 0.25), StageTiming(2.0, 2.0, 2, 0.5, 0.0)]
    alone = [timing._replace(replicas=1, exchange_s=0.0) for timing in timings]
    assert step_seconds(schedule, timings, 8) == pytest.approx(step_seconds(schedule, alone, 4) + 0.25)


def test_a_replicated_stage_works_on_several_micro_batches_at_once() -> None:
    # F0 F2 … and F1 F3 … on two replicas of 2 s, into a stage of 1 s that always has work after the first.
    timings = [StageTiming(2.0, 2.0, 2, 0.0, 0.0), StageTiming(1.0, 1.0, 1, 0.0, 0.0)]
    assert step_seconds("gpipe", timings, 4) == pytest.approx(2 + 4 + 1 + 4 - 1 + 2)
