import time
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.partitioning.bounded_search import fastest_found
from lp_pipe.pipeline.partitioning.cost import ASYNCHRONOUS, COST_MODELS, SCHEDULES, CostModel, Memory
from lp_pipe.pipeline.partitioning.dynamic_program import NestedStage
from lp_pipe.pipeline.partitioning.min_memory import min_memory
from lp_pipe.pipeline.partitioning.nested_levels import NestedLevels
from lp_pipe.pipeline.partitioning.states import states_of
from lp_pipe.pipeline.partitioning.timed_stages import fits, recomputed, slowest, timed_stages
from tests.pipeline.partitioning.brute_force import best, fullest
from tests.pipeline.partitioning.test_min_time import profile_of
from tests.seeds import random_numbers

ALL_SCHEDULES = (*SCHEDULES, *ASYNCHRONOUS)
GROUPS_OF_FOUR = (pp.Level("device", 4, 10.0), pp.Level("host", 3, 10.0))
MODEL = CostModel("pipedream")
numbers = st.integers(0, 8).map(float)


def test_a_stage_has_whole_groups_or_devices_of_one_which_it_may_share() -> None:
    profile = profile_of(
        [(8.0, 0.0, 0.0, 0.0), (2.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 100.0)]
    )  # replicas of the last are dear
    search = NestedLevels(states_of(profile, "none", 10), GROUPS_OF_FOUR, MODEL, None, 12)
    assert search.within(0.99) == []
    assert search.within(1.0) == [
        NestedStage(0, 1, 2, [NestedStage(0, 1, 4, [])]),
        NestedStage(1, 3, 1, [NestedStage(1, 2, 2, []), NestedStage(2, 3, 1, [])]),
    ]


def test_stages_on_two_groups_send_over_the_link_between_them() -> None:
    profile = profile_of([(3.0, 0.0, 8.0, 0.0), (3.0, 0.0, 1.0, 0.0), (3.0, 0.0, 8.0, 0.0), (3.0, 0.0, 0.0, 0.0)])
    levels = (pp.Level("device", 2, 100.0), pp.Level("host", 2, 1.0))
    assert [
        (part.start, part.end, len(part.inside))
        for part in NestedLevels(states_of(profile, "none", 10), levels, MODEL, None, 1).within(3.0)
    ] == [(0, 2, 2), (2, 4, 2)]
    assert NestedLevels(states_of(profile, "none", 10), levels[::-1], MODEL, None, 1).within(3.0) == []


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_what_is_found_fits_and_keeps_to_the_time_and_to_the_devices_there_are(schedule: str) -> None:
    draw = random_numbers(2)
    found = 0
    for _ in range(300):
        few = draw.choice([0.02, 1.0])  # bytes of parameters: replicas are cheap, or dear
        layers = [(draw.random() ** 3, 0.1, draw.random(), few * draw.random()) for _ in range(draw.randint(2, 15))]
        links = [(draw.choice([0.5, 3.0, 40.0]), draw.choice([0.0, 0.1])) for _ in range(draw.randint(2, 3))]
        levels = [pp.Level("x", draw.randint(2, 3), bandwidth, latency) for bandwidth, latency in links]
        recompute, most = draw.choice(["none", "full", "auto"]), draw.choice([2, 27])
        limit = draw.choice([1e9, draw.uniform(1, 40)])
        model, memory = CostModel(draw.choice(COST_MODELS)), Memory(limit, 2.0, schedule, recompute, 3)
        states = states_of(profile_of(layers), recompute, 20)
        asked = draw.uniform(1.0, 4.0) * float(states.compute[-1]) / prod(level.count for level in levels)
        parts = NestedLevels(states, levels, model, memory, most).within(asked)
        if parts:
            found += 1
            stages = timed_stages(parts, states, levels, model, recomputed(parts, states, memory, recompute))
            assert slowest(stages) <= asked * 1.000001 and fits(stages, states, memory)
            assert max(stage.replicas for stage in stages) <= most and _has_devices(parts, levels)
    assert found > 50


def _has_devices(parts: list[NestedStage], levels: list[pp.Level]) -> bool:
    *inner, level = levels
    return sum(part.replicas for part in parts) <= level.count and (
        not inner or all(_has_devices(part.inside, inner) for part in parts)
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=4),
    st.lists(
        st.builds(pp.Level, st.just("x"), st.integers(1, 3), st.sampled_from([0.5, 40.0])), min_size=2, max_size=2
    ),
    st.integers(1, 150),
    st.sampled_from(ALL_SCHEDULES),
)
def test_nothing_that_is_found_beats_brute_force(
    measured: list[tuple[float, float, float, float]], levels: list[pp.Level], limit: int, schedule: str
) -> None:
    profile, memory = profile_of(measured), Memory(limit, 2.0, schedule, "none", 3)
    bound = best(profile, pp.Topology(tuple(levels), limit), schedule=schedule, microbatches=3)
    states = states_of(profile, "none", 10)
    search = NestedLevels(states, levels, MODEL, memory, 9)
    plan = fastest_found(
        search.within, lambda parts: timed_stages(parts, states, levels, MODEL, frozenset()), least=bound
    )
    if plan is not None:
        assert plan.seconds >= bound * 0.999999
        assert plan.gap == pytest.approx(max(0.0, plan.seconds / bound - 1) if bound else 0.0)
    assert plan is None or bound < float("inf")


@pytest.mark.parametrize(
    ("counts", "schedule"), [pytest.param((8, 8), "1f1b", marks=pytest.mark.slow), ((4, 4, 4), "pipedream")]
)
def test_a_thousand_layers_on_nested_levels_within_little_memory_take_seconds_and_have_a_small_gap(
    counts: tuple[int, ...], schedule: str
) -> None:
    draw = random_numbers(0).random
    profile = profile_of([(draw(), 2 * draw(), draw(), draw()) for _ in range(1000)])
    least = min_memory(states_of(profile, "none", 10), Memory(0.0, 2.0, schedule, "none", 8), 64, 64).most
    levels = [pp.Level(f"level{i}", count, 10.0 / 3**i) for i, count in enumerate(counts)]
    started = time.process_time()
    plan = pp.partition(profile, pp.Topology(levels, memory=1.2 * least), schedule=schedule)
    assert time.process_time() - started < 5
    assert 0 <= plan.proven_gap < 0.01
    assert fullest(plan, profile, schedule, 2.0, 8) <= 1.2 * least * (1 + 1e-12)
