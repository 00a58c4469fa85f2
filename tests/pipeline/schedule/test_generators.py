"""The properties that every generator has, for all numbers."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lp_pipe.pipeline.schedule import Costs, Schedule, forward_on, make_schedule, peak_activations, simulate, verify

EQUAL = Costs(forward=1, backward_input=1, backward_weight=1)
SINGLE_CHUNK = ("gpipe", "1f1b", "zb_h1", "zbv")  # or a fixed number
CHUNKED = ("interleaved", "looped_bfs", "forward")

stages = st.integers(1, 6)
microbatches = st.integers(1, 12)
any_schedule = st.one_of(
    st.builds(make_schedule, st.sampled_from(SINGLE_CHUNK), stages, microbatches),
    st.builds(make_schedule, st.sampled_from(CHUNKED), stages, microbatches, st.integers(1, 3)),
    st.builds(lambda p, m: make_schedule("dualpipev", p, 2 * p - 1 + m), stages, microbatches),
)


@given(schedule=any_schedule)
def test_a_generated_schedule_is_proved_sound(schedule: Schedule) -> None:
    verify(schedule, memory=peak_activations(schedule))


@given(schedule=any_schedule)
def test_a_generated_schedule_needs_no_more_credits_than_micro_batches(schedule: Schedule) -> None:
    verify(schedule, credits=schedule.microbatches)


@given(name=st.sampled_from(("gpipe", "1f1b", "forward", "zb_h1", "zbv")), p=stages, m=microbatches)
def test_one_credit_is_enough_for_all_but_rounds(name: str, p: int, m: int) -> None:
    verify(make_schedule(name, p, m), credits=1)


@given(p=stages, m=microbatches, fewer=st.integers(1, 12))
def test_one_credit_is_enough_for_dualpipev_and_its_small_batches(p: int, m: int, fewer: int) -> None:
    schedule = make_schedule("dualpipev", p, 2 * p - 1 + m)
    verify(schedule, credits=1)
    verify(schedule.first_microbatches(fewer), credits=1)


@given(name=st.sampled_from(("zb_h1", "zbv")), p=stages, m=microbatches)
def test_evaluation_on_the_same_workers_needs_two_credits(name: str, p: int, m: int) -> None:
    verify(forward_on(make_schedule(name, p, m).placement, m), credits=2)


@given(schedule=any_schedule)
def test_csv_keeps_a_generated_schedule(schedule: Schedule) -> None:
    assert Schedule.from_csv(schedule.to_csv(), schedule.name) == schedule


@given(schedule=any_schedule)
def test_simulated_actions_keep_the_workers_order_and_do_not_overlap(schedule: Schedule) -> None:
    timeline = simulate(schedule, EQUAL, links=0.5)
    for actions, spans in zip(schedule.workers, timeline.spans, strict=True):
        assert tuple(span.action for span in spans) == actions
        assert all(before.end_s <= after.start_s for before, after in pairwise(spans))
    assert 0 <= timeline.bubble < 1
    assert timeline.peak_activations == peak_activations(schedule)


@given(p=stages, m=microbatches, chunks=st.integers(1, 3))
def test_interleaved_stashes_no_more_than_looped_bfs(p: int, m: int, chunks: int) -> None:
    peaks = [peak_activations(make_schedule(name, p, m, chunks)) for name in ("interleaved", "looped_bfs")]
    assert all(ours <= all_of_them for ours, all_of_them in zip(*peaks, strict=True))
