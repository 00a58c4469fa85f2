import time
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.partitioning.cost import ASYNCHRONOUS, SCHEDULES, CostModel, Memory
from lp_pipe.pipeline.partitioning.dynamic_program import DynamicProgram
from lp_pipe.pipeline.partitioning.equal_speeds import min_time
from lp_pipe.pipeline.partitioning.min_memory import min_memory
from lp_pipe.pipeline.partitioning.states import states_of
from tests.pipeline.partitioning.brute_force import best, fullest
from tests.seeds import random_numbers

ALL_SCHEDULES = (*SCHEDULES, *ASYNCHRONOUS)
LEVEL = pp.Level("device", 12, bandwidth=1.5, latency=0.01)
SLOW = pp.Level("device", 12, bandwidth=0.2)  # a boundary takes as long as a stage
numbers = st.integers(0, 8).map(float)
layers = st.tuples(numbers, numbers, numbers, numbers)


def profile_of(measured: list[tuple[float, float, float, float]], *edges: tuple[int, int]) -> pp.Profile:
    named = tuple(pp.LayerProfile(f"l{i}", *each) for i, each in enumerate(measured))
    return pp.Profile(named, tuple((f"l{a}", f"l{b}") for a, b in edges) if edges else None)


def random_chain(layers: int, seed: int) -> pp.Profile:
    draw = random_numbers(seed).random
    return profile_of([(draw(), 2 * draw(), draw(), draw()) for _ in range(layers)])


def test_a_limit_that_binds_moves_layers_to_where_fewer_micro_batches_wait() -> None:
    # Of three micro-batches the first stage holds two, the last one: (a, b), (c, d) would need 2 * 20 bytes.
    profile = profile_of([(1.0, 2.0, 10.0, 0.0)] * 4)
    plan = pp.partition(profile, pp.Topology([pp.Level("device", 2, 1e9)], memory=30), straight=True, microbatches=3)
    assert [stage.layers for stage in plan.stages] == [("l0",), ("l1", "l2", "l3")]
    assert plan.slowest_seconds == pytest.approx(9) and plan.proven_gap == 0


@pytest.mark.parametrize("heavy_first", [True, False])
def test_both_sides_of_a_boundary_count_each_with_its_own_replicas(heavy_first: bool) -> None:
    # With three replicas of the heavy layer the other's one device takes 2 * 10 / 2.5 s for the tensor between them.
    measured = [(9.0, 0.0, 10.0, 0.0), (1.0, 0.0, 10.0, 10.0)]
    states = states_of(profile_of(measured if heavy_first else measured[::-1]), "none", 100)
    memory = Memory(1e9, 2.0, "1f1b", "none", 8)
    found = min_time(states, pp.Level("device", 4, 2.5), CostModel("pipedream"), memory, 4)
    assert (found.replicas, found.most) == ([2, 2], 4.5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(layers, min_size=1, max_size=6),
    st.builds(
        pp.Level, st.just("x"), st.integers(1, 5), st.sampled_from([0.5, 3.0, 40.0]), st.sampled_from([0.0, 0.5])
    ),
    st.integers(1, 150),
    st.sampled_from(ALL_SCHEDULES),
    st.sampled_from(["none", "full", "auto"]),
    st.sampled_from(["pipedream", "overlap"]),
    st.sampled_from([1, 2, 9]),
)
def test_chains_within_a_memory_limit_equal_brute_force(
    measured: list[tuple[float, float, float, float]],
    level: pp.Level,
    limit: int,
    schedule: str,
    recompute: str,
    cost_model: str,
    most: int,
) -> None:
    profile = profile_of(measured)
    memory = Memory(limit, 2.0, schedule, recompute, 3)
    found = min_time(states_of(profile, recompute, 100), level, CostModel(cost_model), memory, most)
    expected = best(
        profile,
        pp.Topology([level], limit),
        schedule=schedule,
        recompute=recompute,
        cost_model=cost_model,
        max_replicas=most,
        microbatches=3,
    )
    assert found.most == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_the_search_of_whole_tables_finds_nothing_faster(schedule: str, recompute: str) -> None:
    for seed, (level, factor) in enumerate(product((LEVEL, SLOW), (1.001, 1.1, 1.5))):
        states = states_of(random_chain(30, seed), recompute, 100)
        least = min_memory(states, Memory(0.0, 2.0, schedule, recompute, 8), level.count, level.count).most
        memory = Memory(factor * least, 2.0, schedule, recompute, 8)
        found = min_time(states, level, CostModel("pipedream"), memory, level.count)
        search = DynamicProgram(states, (level,), CostModel("pipedream"), level.count, memory)
        assert found.most == pytest.approx(search.seconds(), rel=1e-12)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(layers, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), unique=True),
    st.sampled_from(ALL_SCHEDULES),
    st.sampled_from(["none", "full", "auto"]),
    st.sampled_from([1, 9]),
)
def test_the_least_memory_that_any_plan_needs_equals_brute_force(
    measured: list[tuple[float, float, float, float]],
    pairs: list[tuple[int, int]],
    schedule: str,
    recompute: str,
    most: int,
) -> None:
    edges = [(a, b) for a, b in pairs if a < b < len(measured)]
    profile = profile_of(measured, *edges)
    memory = Memory(0.0, 2.0, schedule, recompute, 3)
    needed = min_memory(states_of(profile, recompute, 100), memory, 4, most).most

    def takes(limit: float) -> float:
        topology = pp.Topology([pp.Level("x", 4, 1.0)], memory=limit)
        options = {"schedule": schedule, "recompute": recompute, "microbatches": 3, "max_replicas": most}
        return best(profile, topology, **options)  # type: ignore[arg-type]

    assert np.isfinite(takes(needed)) if needed else True
    assert needed <= 1 or not np.isfinite(takes(needed - 1))


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("pipedream", marks=pytest.mark.slow)])
def test_a_thousand_layers_on_64_devices_within_little_memory_take_seconds_and_have_no_gap(schedule: str) -> None:
    profile = random_chain(1000, seed=0)
    states = states_of(profile, "none", 2500)
    least = min_memory(states, Memory(0.0, 2.0, schedule, "none", 8), 64, 64).most
    topology = pp.Topology([pp.Level("device", 64, bandwidth=10.0)], memory=1.05 * least)
    started = time.process_time()
    plan = pp.partition(profile, topology, schedule=schedule)
    assert time.process_time() - started < 5
    assert plan.proven_gap == 0 and plan.devices <= 64
    assert fullest(plan, profile, schedule, 2.0, 8) <= 1.05 * least * (1 + 1e-12)


def test_layers_that_take_no_time_and_no_memory_are_planned_too() -> None:
    profile = profile_of([(0.0, 0.0, 0.0, 0.0)] * 30)
    assert pp.partition(profile, pp.Topology([LEVEL], memory=1)).slowest_seconds == 0
    found = min_time(
        states_of(profile, "none", 100), LEVEL, CostModel("overlap"), Memory(0.0, 2.0, "1f1b", "none", 8), 9
    )
    assert found.most == 0
