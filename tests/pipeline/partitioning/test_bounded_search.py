import lp_pipe.pipeline as pp
from lp_pipe.pipeline.partitioning.bounded_search import fastest_found, lower_bound
from lp_pipe.pipeline.partitioning.cost import COST_MODELS, CostModel
from lp_pipe.pipeline.partitioning.device_orders import CountedSpeeds
from lp_pipe.pipeline.partitioning.mixed_speeds import MixedSpeeds
from lp_pipe.pipeline.partitioning.nested_levels import NestedLevels
from lp_pipe.pipeline.partitioning.states import states_of
from lp_pipe.pipeline.partitioning.timed_stages import slowest, timed_stages
from tests.pipeline.partitioning.test_min_time import profile_of
from tests.seeds import random_numbers

MODEL = CostModel("pipedream")


def test_the_fastest_plan_that_is_found_reports_its_gap_to_the_bound() -> None:
    states = states_of(profile_of([(3.0, 0.0, 0.0, 90.0), (2.0, 0.0, 0.0, 90.0), (1.0, 0.0, 0.0, 90.0)]), "none", 10)
    levels = [pp.Level("device", 2, 10.0), pp.Level("host", 2, 10.0)]
    search = NestedLevels(states, levels, MODEL, None, 4)
    plan = fastest_found(
        search.within, lambda parts: timed_stages(parts, states, levels, MODEL, frozenset()), least=2.0
    )
    assert plan is not None and [(stage.start, stage.end) for stage in plan.stages] == [(0, 1), (1, 3)]
    assert (plan.seconds, plan.least, plan.gap) == (3.0, 2.0, 0.5)


def test_no_plan_is_faster_than_all_devices_together_or_than_the_stage_of_a_layer() -> None:
    profile, level = profile_of([(3.0, 1.0, 0.0, 90.0), (1.0, 1.0, 0.0, 0.0)]), pp.Level("device", 3, 10.0)
    assert lower_bound(6.0, [1.0, 1.0, 0.5], level, MODEL, 1, profile) == 4.0
    assert lower_bound(60.0, [1.0, 1.0, 0.5], level, MODEL, 1, profile) == 24.0


def test_a_tensor_that_only_replicas_can_send_in_time_does_not_hide_a_later_boundary() -> None:
    # Two devices reach farthest with c and d, but b has one device, which would take 6 s to send its tensor to c.
    heavy = 100.0
    layers = [(4.0, 0.0, 1.0, heavy), (1.0, 0.0, 3.0, heavy), (1.0, 0.0, 0.5, 0.0), (6.0, 0.0, 0.0, 0.0)]
    states, level = states_of(profile_of(layers), "none", 10), pp.Level("device", 4, 1.0)
    found = CountedSpeeds(states, level, (1.0,) * 4, MODEL, None, 4).within(4.0)
    assert [(stage.start, stage.end, len(stage.devices)) for stage in found] == [(0, 1, 1), (1, 3, 1), (3, 4, 2)]


def test_on_short_chains_the_plans_are_the_best_but_for_a_few() -> None:
    draw, found_best = random_numbers(3), 0
    for _ in range(100):
        layers = [(draw.random() ** 3, 0.1, draw.random(), draw.random()) for _ in range(draw.randint(1, 10))]
        speeds = tuple(draw.choice([1.0, 0.7, 0.25]) for _ in range(draw.randint(1, 6)))
        level = pp.Level("x", len(speeds), draw.choice([0.5, 3.0, 40.0]), draw.choice([0.0, 0.1]), speeds=speeds)
        devices = MixedSpeeds(level, CostModel(draw.choice(COST_MODELS)), "none", "any")
        states = states_of(profile_of(layers), "none", 20)
        plan, best = devices.of_all_cuts(states, 8, None, lambda: 1e-3), devices.searched(states, 8, None)
        assert plan is not None and best is not None and plan.seconds >= slowest(best) * (1 - 1e-9)
        found_best += plan.seconds <= slowest(best) * 1.001
    assert found_best >= 80
