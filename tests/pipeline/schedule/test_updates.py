"""The updates of an asynchronous pipeline's stages, which never wait for each other in a ring."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.schedule.updates import Timing, may_overlap, turns

Event = tuple[str, int, int]  # operation, step, micro-batch or group


def text(timing: Timing, microbatches: int, **options: int) -> str:
    return " ".join(f"{t.op}{t.microbatch}{chr(39) * t.ahead}" for t in turns(timing, 0, 1, microbatches, **options))


def test_the_first_of_three_stages_keeps_three_micro_batches_in_flight() -> None:
    first = pp.Updates().timings([1, 1, 1])[0]
    assert first == Timing(every=1, delay=2, in_flight=3)
    assert text(first, 4) == "F0 F1 F2 B0 U0 F3 B1 U1 B2 U2 B3 U3"
    assert text(first, 4, ahead=4) == "F0 F1 F2 B0 U0 F3 B1 U1 F0' B2 U2 F1' B3 U3"
    assert text(first, 4, ahead=4, forwarded=2) == "F2 B0 U0 F3 B1 U1 F0' B2 U2 F1' B3 U3"


def test_2bw_updates_once_for_as_many_micro_batches_as_there_are_stages() -> None:
    first, second, last = pp.Updates(coalesced=True).timings([1, 1, 1])
    assert {timing.delay for timing in (first, second, last)} == {1}
    assert text(last, 7) == "F0 B0 F1 B1 F2 B2 U2 F3 B3 F4 B4 F5 B5 U5 F6 B6 U6"
    assert text(first, 6) == "F0 F1 F2 B0 F3 B1 F4 B2 U2 F5 B3 B4 B5 U5"


def test_a_pipeline_of_one_stage_is_never_late() -> None:
    for coalesced in (False, True):
        assert pp.Updates(coalesced=coalesced).timings([1]) == (Timing(every=1, delay=0, in_flight=1),)


def test_vertical_sync_gives_all_stages_the_delay_of_the_first() -> None:
    assert [timing.delay for timing in pp.Updates(vertical_sync=True).timings([2, 2, 2])] == [2, 2, 2]
    with pytest.raises(pp.ScheduleError, match="the same number of replicas"):
        pp.Updates(vertical_sync=True).timings([1, 2])
    with pytest.raises(pp.ScheduleError, match="for asynchronous schedules"):
        pp.vertical_sync(pp.make_schedule("1f1b", 2, 4))


@given(
    replicas=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    coalesced=st.booleans(),
)
def test_stages_and_their_replicas_never_wait_in_a_ring(replicas: list[int], steps: list[int], coalesced: bool) -> None:
    """Every rank runs its turns in order, waits for neighbours' messages, and in an update for its other replicas."""
    timings = pp.Updates(coalesced=coalesced).timings(replicas)
    ranks = [(stage, replica) for stage, count in enumerate(replicas) for replica in range(count)]
    left = {rank: events_of(timings, replicas, steps, *rank) for rank in ranks}
    forwards, backwards, updates = set[Event](), set[Event](), set[tuple[int, int, Event]]()

    def can_run(stage: int, event: Event) -> bool:
        if event[0] == "F":
            return stage == 0 or (f"{stage - 1}", *event[1:]) in forwards
        if event[0] == "B":
            return stage == len(replicas) - 1 or (f"{stage + 1}", *event[1:]) in backwards
        return all((stage, replica, event) in updates for replica in range(replicas[stage]))

    moved = True
    while moved:
        moved = False
        for (stage, replica), events in left.items():
            while events:
                event = events[0]
                if event[0] == "U":
                    moved = moved or (stage, replica, event) not in updates
                    updates.add((stage, replica, event))
                if not can_run(stage, event):
                    break
                if event[0] != "U":
                    (forwards if event[0] == "F" else backwards).add((f"{stage}", *event[1:]))
                events.pop(0)
                moved = True
    assert not any(left.values()), left


def events_of(
    timings: Sequence[Timing], replicas: Sequence[int], steps: Sequence[int], stage: int, replica: int
) -> list[Event]:
    events, forwarded = [], 0
    for index, microbatches in enumerate(steps):
        following = steps[index + 1] if index + 1 < len(steps) else 0
        ahead = following if may_overlap(timings, replicas, microbatches, following) else 0
        own = list(turns(timings[stage], replica, replicas[stage], microbatches, forwarded=forwarded, ahead=ahead))
        forwarded = sum(turn.ahead for turn in own)
        events += [(t.op, index + t.ahead, t.group if t.op == "U" else t.microbatch) for t in own]
    return events
