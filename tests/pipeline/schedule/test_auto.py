"""The automatic schedule: sound, repeatable, and never worse than a named one."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule import (
    Costs,
    Schedule,
    make_schedule,
    peak_activations,
    search_schedule,
    simulate,
    verify,
)

EQUAL = Costs(forward=1, backward_input=1, backward_weight=1)
NAMED = ("1f1b", "gpipe", "zb_h1", "interleaved", "looped_bfs", "zbv", "dualpipev")


def named(p: int, m: int, chunks: int, memory: int | None = None) -> list[Schedule]:
    """Return the schedules that exist for these numbers and keep within the limit."""
    found = []
    for name in NAMED:
        try:
            schedule = make_schedule(name, p, m, chunks)
            verify(schedule, memory=memory)
            found.append(schedule)
        except ScheduleError:
            continue
    return found


def fastest_named(
    p: int, m: int, costs: Costs, chunks: int = 1, memory: int | None = None, links: float | None = None
) -> float:
    return min(
        (simulate(schedule, costs, links).makespan for schedule in named(p, m, chunks, memory)), default=float("inf")
    )


def test_uneven_stages_are_scheduled_faster_than_by_any_named_schedule() -> None:
    """Worker 2 is the slowest: it should never wait, and the others have time for more forwards in advance."""
    costs = Costs(forward=[1, 1, 4, 1], backward_input=[1, 3, 2, 1], backward_weight=[2, 1, 1, 3])
    schedule = search_schedule(4, 6, costs)
    verify(schedule, credits=4)
    assert simulate(schedule, costs).makespan < fastest_named(4, 6, costs)


def test_less_memory_than_any_named_schedule_needs_makes_a_longer_step() -> None:
    assert named(4, 8, chunks=1, memory=3) == []
    schedule = search_schedule(4, 8, EQUAL, memory=3)
    verify(schedule, credits=4, memory=3)
    assert simulate(search_schedule(4, 8, EQUAL), EQUAL).makespan == 27
    assert 27 < simulate(schedule, EQUAL).makespan < 33  # and still faster than 1F1B with 4


def test_one_activation_each_is_enough_for_one_chunk() -> None:
    schedule = search_schedule(3, 4, EQUAL, memory=1)
    assert peak_activations(schedule) == (1, 1, 1)


def test_workers_may_have_limits_of_their_own() -> None:
    verify(search_schedule(3, 6, EQUAL, memory=[3, 1, 2]), credits=4, memory=[3, 1, 2])


@pytest.mark.parametrize(("memory", "message"), [(1, "use memory=2 or more"), ([4, 4], "memory has 2 limits: .* 3")])
def test_limits_that_cannot_be_kept_are_refused(memory: int | list[int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        search_schedule(3, 4, EQUAL, chunks=2, memory=memory)


@st.composite
def costs_of(draw: st.DrawFn, count: int) -> Costs:
    seconds = st.lists(st.sampled_from([0.0, 0.3, 1.0, 1.7, 4.0]), min_size=count, max_size=count)
    return Costs(forward=draw(seconds), backward_input=draw(seconds), backward_weight=draw(seconds))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), p=st.integers(1, 4), m=st.integers(1, 6), chunks=st.integers(1, 2))
def test_it_is_sound_and_never_slower_than_a_named_schedule(data: st.DataObject, p: int, m: int, chunks: int) -> None:
    costs = data.draw(costs_of(p * chunks))
    memory = data.draw(st.none() | st.integers(chunks, chunks * m))
    links = data.draw(st.sampled_from([None, 0.0, 0.4]))
    schedule = search_schedule(p, m, costs, chunks=chunks, memory=memory, links=links)
    verify(schedule, credits=4, memory=memory)
    assert schedule.microbatches == m
    assert schedule.stages == p * chunks
    assert simulate(schedule, costs, links).makespan <= fastest_named(p, m, costs, chunks, memory, links)


def test_the_same_question_has_the_same_answer() -> None:
    costs = Costs(forward=[1, 2, 1], backward_input=[1, 1, 2], backward_weight=[2, 1, 1])
    state = random.getstate()
    assert search_schedule(3, 5, costs) == search_schedule(3, 5, costs)
    assert random.getstate() == state  # the user's own numbers are left alone


def test_lists_in_costs_say_how_many_chunks_there_are() -> None:
    costs = Costs(forward=[1, 1, 1, 1], backward_input=1, backward_weight=1)
    assert search_schedule(2, 3, costs).stages == 4


def test_it_can_be_asked_for_by_name() -> None:
    schedule = make_schedule("auto", 4, 8)
    assert schedule.name == "auto"
    assert simulate(schedule, EQUAL).makespan == fastest_named(4, 8, EQUAL) == 27
    assert make_schedule("auto", 2, 4, chunks=2).stages == 4


def test_whole_backwards_are_kept_where_splitting_them_gains_nothing() -> None:
    assert search_schedule(1, 3, EQUAL).to_csv() == "0F0,0B0,0F1,0B1,0F2,0B2\n"


@pytest.mark.parametrize(
    ("sizes", "message"), [((0, 4), "stages=0"), ((2, 0), "microbatches=0"), ((2.5, 4), "stages=2.5")]
)
def test_impossible_numbers_are_named(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        search_schedule(*sizes, EQUAL)
