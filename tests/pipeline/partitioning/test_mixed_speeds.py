"""Devices of different speeds."""

import time
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.partitioning import device_orders, mixed_speeds
from lp_pipe.pipeline.partitioning.device_orders import rounded
from tests.pipeline.partitioning.brute_force import Layers, closed_sets, held
from tests.pipeline.partitioning.test_partition import chain, profiles, random_chain

quick = settings(max_examples=25, deadline=None, derandomize=True)
Assigned = tuple[tuple[Layers, Layers, tuple[int, ...]], ...]  # stages, each from a set to a set, on devices


def topology(*speeds: float, bandwidth: float = 1e9, memory: float | None = None) -> pp.Topology:
    return pp.Topology((pp.Level("device", len(speeds), bandwidth, speeds=speeds),), memory)


def best(profile: pp.Profile, topology: pp.Topology, order: str, most: int, recompute: str = "none") -> float:
    """Return the best time of all stages on all sets of devices."""
    everything = frozenset(range(len(profile.layers)))
    devices = frozenset(range(topology.devices))
    plans = _plans(frozenset(), everything, devices, closed_sets(profile), order, most)
    return min((_slowest(plan, profile, topology, recompute) for plan in plans), default=float("inf"))


def _plans(
    start: Layers, end: Layers, free: frozenset[int], sets: Sequence[Layers], order: str, most: int
) -> Iterator[Assigned]:
    if start == end:
        yield ()
        return
    for replicas in range(1, min(most, len(free)) + 1):
        for devices in combinations(sorted(free), replicas):
            left = frozenset(d for d in free if d > max(devices)) if order == "given" else free - {*devices}
            for cut in sets:
                if start < cut:
                    for rest in _plans(cut, end, left, sets, order, most):
                        yield ((start, cut, devices), *rest)


def _slowest(plan: Assigned, profile: pp.Profile, topology: pp.Topology, recompute: str) -> float:
    level = topology.levels[0]
    assert level.speeds is not None
    worst = 0.0
    counts = held("1f1b", tuple(len(devices) for _, _, devices in plan), 8)
    for (waiting, _), (start, end, devices) in zip(counts, plan, strict=True):
        own = [profile.layers[i] for i in end - start]
        r, speed = len(devices), min(level.speeds[d] for d in devices)
        weights, activations = sum(x.parameter_bytes for x in own), sum(x.activation_bytes for x in own)
        sides = [_crossing(s, profile) for s in (start, end)]
        compute = sum(x.forward_s + x.backward_s for x in own)
        if topology.memory is not None and weights * 3 + waiting * activations > topology.memory:
            if recompute == "none" or weights * 3 + waiting * sides[0] + activations > topology.memory:
                return float("inf")
            compute += sum(x.forward_s for x in own)
        took = (compute / speed + 4 * (r - 1) * weights / (r * level.bandwidth)) / r
        worst = max(worst, took, *(2 * side / level.bandwidth / r for side in sides))
    return worst


def _crossing(done: Layers, profile: pp.Profile) -> float:
    awaited = {source for source, reader in profile.links if source in done and reader not in done}
    return sum(profile.layers[i].activation_bytes for i in awaited)


def test_the_heavy_layers_go_to_the_fast_devices() -> None:
    plan = pp.partition(chain([1, 2]), topology(1.0, 0.5), straight=True)
    assert [(stage.layers, stage.devices) for stage in plan.stages] == [(("a",), (1,)), (("b",), (0,))]
    assert [stage.predicted_seconds for stage in plan.stages] == pytest.approx([2, 2])
    given_order = pp.partition(chain([1, 2]), topology(1.0, 0.5), straight=True, device_order="given")
    assert given_order.slowest_seconds == pytest.approx(3)  # on the fast one alone: in that order two are slower
    assert [stage.devices for stage in given_order.stages] == [(0,)]


def test_the_slowest_replica_sets_the_pace_so_a_slow_device_may_stay_idle() -> None:
    plan = pp.partition(chain([6]), topology(1.0, 1.0, 0.1))
    assert plan.slowest_seconds == pytest.approx(3) and plan.stages[0].devices == (0, 1)
    assert "1 device idle" in plan.reason


@quick
@given(
    profiles(most=4, is_dag=True),
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=4),
    st.sampled_from(["any", "given"]),
    st.sampled_from([1, 2, 9]),
    st.sampled_from([0.5, 40.0]),
)
def test_unequal_devices_equal_brute_force(
    profile: pp.Profile, speeds: list[float], order: str, most: int, bandwidth: float
) -> None:
    devices = topology(*speeds, bandwidth=bandwidth)
    plan = pp.partition(profile, devices, max_replicas=most, device_order=order)
    assert plan.slowest_seconds == pytest.approx(best(profile, devices, order, most))
    assert plan.proven_gap == 0
    used = [device for stage in plan.stages for device in stage.devices]
    assert len(used) == len({*used}) == (plan.devices if {*speeds} != {1.0} else 0)
    assert order == "any" or used == sorted(used)


@quick
@given(
    profiles(most=4, is_dag=False),
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=3),
    st.sampled_from(["any", "given"]),
    st.integers(1, 150),
    st.sampled_from(["none", "auto"]),
)
def test_unequal_devices_with_a_memory_limit_equal_brute_force(
    profile: pp.Profile, speeds: list[float], order: str, memory: int, recompute: str
) -> None:
    devices = topology(*speeds, bandwidth=3.0, memory=memory)
    expected = best(profile, devices, order, 9, recompute)
    if expected == float("inf"):
        with pytest.raises(pp.PartitionError, match="memory"):
            pp.partition(profile, devices, device_order=order, recompute=recompute)
    else:
        plan = pp.partition(profile, devices, device_order=order, recompute=recompute)
        assert plan.slowest_seconds == pytest.approx(expected)


@quick
@given(profiles(most=4, is_dag=False), st.lists(st.integers(1, 20).map(float), min_size=4, max_size=4, unique=True))
def test_four_speeds_are_exact_or_within_the_proven_gap(profile: pp.Profile, speeds: list[float]) -> None:
    devices = topology(*speeds, bandwidth=3.0)
    optimum = best(profile, devices, "any", 9)
    assert pp.partition(profile, devices).slowest_seconds == pytest.approx(optimum)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_orders, "MOST_PLACES", 30)  # four devices of four speeds have 42
        plan = pp.partition(profile, devices)
    assert optimum <= plan.slowest_seconds * (1 + 1e-9)
    assert plan.slowest_seconds <= optimum * (1 + plan.proven_gap) * (1 + 1e-9)


def test_a_stage_recomputes_only_where_its_replicas_do_not_hold_their_share() -> None:
    """Regression: each replica counted as if it held all micro-batches, so that the plan recomputed needlessly."""
    profile = pp.Profile((pp.LayerProfile("only", 0.6, 0.3, activation_bytes=100, parameter_bytes=0),))
    plan = pp.partition(
        profile, topology(2.5, 1.0, memory=400), schedule="gpipe", recompute="auto", microbatches=8, max_replicas=2
    )
    assert [(stage.replicas, stage.recompute) for stage in plan.stages] == [(2, "none")]
    assert plan.slowest_seconds == pytest.approx(0.45)  # the fast device alone: 0.6, recomputed


def test_equal_speeds_are_planned_as_devices_without() -> None:
    profile = chain([3, 1, 2, 2])
    level = pp.Level("device", 3, 1e9)
    assert pp.partition(profile, topology(1.0, 1.0, 1.0)) == pp.partition(profile, pp.Topology((level,)))
    half = pp.partition(profile, topology(0.5, 0.5, 0.5))
    assert half.slowest_seconds == pytest.approx(2 * pp.partition(profile, pp.Topology((level,))).slowest_seconds)


def test_where_all_cuts_would_take_too_long_the_plan_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_speeds, "MOST_WORK", 1e6)
    plan = pp.partition(random_chain(100), topology(*[1.0] * 3, *[0.5] * 3, *[0.25] * 3))
    assert 0 < plan.proven_gap < 0.2
    assert "too many places to cut" in plan.reason


def test_many_devices_of_three_speeds_count_as_devices_of_fewer() -> None:
    plan = pp.partition(random_chain(20), topology(*[1.0] * 20, *[0.9] * 20, *[0.2] * 20))
    assert 0 < plan.proven_gap < 0.2
    assert "60 devices of 3 different speeds are too many to search all their orders" in plan.reason


def test_hundreds_of_layers_on_64_devices_in_a_given_order_take_seconds() -> None:
    # To find the stages of the best plan took ten times as long as to find how fast it is.
    started = time.process_time()
    plan = pp.partition(random_chain(500), topology(*[1.0] * 30, *[0.5] * 20, *[0.25] * 14), device_order="given")
    assert time.process_time() - started < 8
    assert plan.proven_gap == 0


def test_speeds_are_rounded_to_neighbours() -> None:
    assert rounded([1.0, 0.5, 0.9, 0.11, 0.1], 3) == ([0.9, 0.5, 0.9, 0.1, 0.1], [1.0, 0.5, 1.0, 0.11, 0.11])
    assert rounded([2.0, 1.0], 3) == ([2.0, 1.0], [2.0, 1.0])


def test_speeds_are_refused_where_there_are_several_levels() -> None:
    levels = pp.Level("device", 2, 1e9, speeds=(1.0, 0.5)), pp.Level("host", 2, 1e8)
    with pytest.raises(pp.PartitionError, match=r"levels\[0\].speeds: .* 2"):
        pp.partition(chain([1, 2]), pp.Topology(levels))


def test_an_unknown_order_is_named() -> None:
    with pytest.raises(pp.PartitionError, match="device_order='best'"):
        pp.partition(chain([1, 2]), topology(1.0, 0.5), device_order="best")
