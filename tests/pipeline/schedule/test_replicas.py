"""Schedules for stages with replicas: micro-batch j belongs to replica j mod r."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule import Schedule, make_schedule, replicated, schedules, share, verify
from lp_pipe.pipeline.schedule.stash import peak_activations


def _text(schedule: Schedule, replicas: tuple[int, ...]) -> list[list[str]]:
    return [
        [" ".join(f"{a.op}{a.microbatch}" for a in share(actions, count, replica)) for replica in range(count)]
        for actions, count in zip(schedule.workers, replicas, strict=True)
    ]


def test_equal_replicas_are_pipelines_side_by_side() -> None:
    assert _text(replicated("1f1b", (2, 2), microbatches=6), (2, 2)) == [
        ["F0 F2 B0 F4 B2 B4", "F1 F3 B1 F5 B3 B5"],
        ["F0 B0 F2 B2 F4 B4", "F1 B1 F3 B3 F5 B5"],
    ]


def test_1f1b_starts_with_enough_to_keep_all_replicas_behind_a_stage_busy() -> None:
    """PipeDream, section 3.2: three workers behind stage 0's one need three micro-batches before the first backward."""
    assert _text(replicated("1f1b", (1, 2), microbatches=5), (1, 2)) == [
        ["F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"],
        ["F0 B0 F2 B2 F4 B4", "F1 B1 F3 B3"],
    ]


def test_a_stage_waits_for_no_more_than_the_one_before_it_sends() -> None:
    # Alone, stage 1 would start with 10: 6 replicas behind it, in rounds of 5.
    schedule = replicated("1f1b", (1, 5, 1), microbatches=20)
    verify(schedule)
    assert peak_activations(schedule) == (7, 7, 1)


@settings(deadline=None, max_examples=80)
@given(
    name=st.sampled_from([name for name in schedules() if name not in ("forward", "auto")]),
    replicas=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    microbatches=st.integers(8, 16),
)
def test_every_schedule_stays_correct(name: str, replicas: list[int], microbatches: int) -> None:
    microbatches *= max(replicas)
    schedule = replicated(name, replicas, microbatches)
    verify(schedule, credits=microbatches)
    assert schedule.placement == make_schedule(name, len(replicas), 8).placement
    shares = [
        action
        for actions, count in zip(schedule.workers, replicas, strict=True)
        for replica in range(count)
        for action in share(actions, count, replica)
    ]
    assert sorted(shares) == sorted(action for actions in schedule.workers for action in actions)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_fewer_microbatches_than_replicas_leave_some_without(microbatches: int) -> None:
    schedule = replicated("1f1b", (4, 4), microbatches)
    verify(schedule)
    assert [bool(share(schedule.workers[0], 4, replica)) for replica in range(4)] == [
        replica < microbatches for replica in range(4)
    ]


def test_what_replicas_are_too_many_for_is_said_of_each() -> None:
    """The advice was what had been asked for: two replicas with 4 micro-batches were told to use 4."""
    with pytest.raises(
        ScheduleError, match=r"use microbatches=4 .*\(for each of 2 replicas, which share microbatches=4\)"
    ):
        replicated("dualpipev", [2, 2], 4)
