import time
from collections.abc import Collection

import pytest

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.partitioning.cost import ASYNCHRONOUS, COST_MODELS, SCHEDULES, CostModel, Memory
from lp_pipe.pipeline.partitioning.device_orders import CountedSpeeds, StageOnDevices
from lp_pipe.pipeline.partitioning.dynamic_program import NestedStage
from lp_pipe.pipeline.partitioning.states import states_of
from lp_pipe.pipeline.partitioning.timed_stages import recomputed
from tests.pipeline.partitioning.brute_force import fullest
from tests.pipeline.partitioning.test_min_time import profile_of
from tests.seeds import random_numbers

FAST_LINKS = pp.Level("device", 3, 1e9)


def test_stages_get_devices_of_a_speed_that_they_need_wherever_those_are_in_the_list() -> None:
    states = states_of(profile_of([(1.0, 1.0, 0.0, 0.0), (4.0, 4.0, 0.0, 9.0), (1.0, 1.0, 0.0, 0.0)]), "none", 10)
    search = CountedSpeeds(states, FAST_LINKS, (1.0, 4.0, 1.0), CostModel("pipedream"), None, 1)
    found = search.within(2.0)
    assert [(stage.start, stage.end) for stage in found] == [(0, 1), (1, 2), (2, 3)]
    assert found[1] == StageOnDevices(1, 2, (1,)) and {found[0].devices, found[2].devices} == {(0,), (2,)}
    assert search.within(1.99) == []


@pytest.mark.parametrize("schedule", [*SCHEDULES, *ASYNCHRONOUS])
def test_what_is_found_keeps_to_the_time_and_the_memory_and_serves_each_device_once(schedule: str) -> None:
    draw = random_numbers(5)
    found = 0
    for _ in range(200):
        few = draw.choice([0.02, 1.0])  # bytes of parameters: replicas are cheap, or dear
        layers = [(draw.random() ** 3, 0.1, draw.random(), few * draw.random()) for _ in range(draw.randint(1, 12))]
        speeds = tuple(draw.choice([1.0, 0.7, 0.25]) for _ in range(draw.randint(1, 8)))
        level = pp.Level("x", len(speeds), draw.choice([0.5, 3.0, 40.0]), draw.choice([0.0, 0.1]))
        model, limit, most = CostModel(draw.choice(COST_MODELS)), draw.choice([1e9, draw.uniform(1, 40)]), 3
        recompute = draw.choice(["none", "full", "auto"])
        profile, memory = profile_of(layers), Memory(limit, 2.0, schedule, recompute, 8)
        states = states_of(profile, recompute, 20)
        asked = draw.uniform(1.0, 4.0) * float(states.compute[-1]) / sum(speeds)
        stages = CountedSpeeds(states, level, speeds, model, memory, most).within(asked)
        if stages:
            found += 1
            again = recomputed(
                [NestedStage(s.start, s.end, len(s.devices), []) for s in stages], states, memory, recompute
            )
            assert _seconds(stages, layers, speeds, level, model, again) <= asked * 1.000001
            planned = [
                pp.PlannedStage(
                    tuple(f"l{i}" for i in range(s.start, s.end)),
                    len(s.devices),
                    0.0,
                    recompute="full" if (s.start, s.end) in again else "none",
                )
                for s in stages
            ]
            assert fullest(pp.Plan(tuple(planned), 0.0), profile, schedule, 2.0, 8) <= limit
            used = [device for stage in stages for device in stage.devices]
            assert len(set(used)) == len(used) and [stage.end for stage in stages][-1] == len(layers)
    assert found > 50


def _seconds(
    stages: list[StageOnDevices],
    layers: list[tuple[float, float, float, float]],
    speeds: tuple[float, ...],
    level: pp.Level,
    model: CostModel,
    again: Collection[tuple[int, int]],
) -> float:
    """The slowest stage or side, by the formulas in docs/partitioning.md."""
    slowest = 0.0
    for start, end, devices in stages:
        r = len(devices)
        forwards = 2 if (start, end) in again else 1
        compute = sum(forwards * layer[0] + layer[1] for layer in layers[start:end]) / min(
            speeds[device] for device in devices
        )
        exchange = 4 * (r - 1) * sum(layer[3] for layer in layers[start:end]) / (r * level.bandwidth)
        exchange += 2 * (r - 1) * level.latency
        took = compute + exchange if model.name == "pipedream" else max(compute, exchange)
        crossing = [layers[cut - 1][2] for cut in (start, end) if 0 < cut < len(layers)]
        sides = [2 * each / level.bandwidth + 2 * level.latency for each in crossing]
        slowest = max(slowest, *(each / r for each in (took, *sides)))
    return slowest


def test_a_thousand_layers_on_64_devices_of_three_speeds_take_seconds_and_have_a_small_gap() -> None:
    draw = random_numbers(0)
    profile = profile_of([(draw.random(), 2 * draw.random(), draw.random(), draw.random()) for _ in range(1000)])
    speeds = tuple(draw.choice((1.0, 0.7, 0.5)) for _ in range(64))
    started = time.process_time()
    plan = pp.partition(profile, pp.Topology([pp.Level("device", 64, 10.0, speeds=speeds)]))
    assert time.process_time() - started < 5
    assert 0 < plan.proven_gap < 0.05
    used = [device for stage in plan.stages for device in stage.devices]
    assert len(set(used)) == len(used) == plan.devices
