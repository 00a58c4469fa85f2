import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.partitioning import equal_speeds
from lp_pipe.pipeline.partitioning.cost import Memory
from tests.pipeline.partitioning.brute_force import best, fullest, held
from tests.seeds import random_numbers

VGG16 = Path(__file__).parents[2] / "data" / "vgg16_graph.txt"
ONE_LEVEL = (pp.Level("device", 4, 10.0),)
quick = settings(max_examples=25, deadline=None, derandomize=True)

numbers = st.integers(0, 8).map(float)


def chain(times: list[float], *, activations: float = 0.0, parameters: float = 0.0) -> pp.Profile:
    """Layers a, b, c, … of which a third is forward and two thirds are backward."""
    return pp.Profile(
        tuple(
            pp.LayerProfile(chr(ord("a") + place), t / 3, t * 2 / 3, activations, parameters)
            for place, t in enumerate(times)
        )
    )


def random_chain(layers: int, seed: int = 0) -> pp.Profile:
    draw = random_numbers(seed).random
    return pp.Profile(tuple(pp.LayerProfile(f"l{i}", draw(), draw(), draw(), draw()) for i in range(layers)))


@st.composite
def profiles(draw: st.DrawFn, *, most: int, is_dag: bool) -> pp.Profile:
    count = draw(st.integers(1, most))
    layers = tuple(pp.LayerProfile(f"l{i}", *(draw(numbers) for _ in range(4))) for i in range(count))
    if not is_dag:
        return pp.Profile(layers)
    pairs = [(i, j) for j in range(count) for i in range(j)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return pp.Profile(layers, tuple((f"l{i}", f"l{j}") for i, j in edges))


def levels(counts: list[int]) -> st.SearchStrategy[tuple[pp.Level, ...]]:
    bandwidth = st.sampled_from([0.5, 3.0, 40.0])
    latency = st.sampled_from([0.0, 0.5])
    level = [st.builds(pp.Level, st.just("x"), st.integers(1, count), bandwidth, latency) for count in counts]
    return st.tuples(*level)


def test_equal_layers_are_shared_out_evenly() -> None:
    plan = pp.partition(chain([3, 1, 1, 1]), pp.Topology([pp.Level("device", 2, bandwidth=1e9)]))
    assert [stage.layers for stage in plan.stages] == [("a",), ("b", "c", "d")]
    assert [stage.predicted_seconds for stage in plan.stages] == pytest.approx([3, 3])
    assert plan.slowest_seconds == pytest.approx(3)
    assert plan.proven_gap == 0


def test_a_heavy_layer_gets_replicas_unless_they_are_forbidden() -> None:
    profile = chain([9, 3])
    plan = pp.partition(profile, pp.Topology(ONE_LEVEL))
    assert [(stage.layers, stage.replicas) for stage in plan.stages] == [(("a",), 3), (("b",), 1)] or plan.devices == 4
    assert plan.slowest_seconds == pytest.approx(3)
    assert pp.partition(profile, pp.Topology(ONE_LEVEL), straight=True).slowest_seconds == pytest.approx(9)
    assert pp.partition(profile, pp.Topology(ONE_LEVEL), max_replicas=2).slowest_seconds == pytest.approx(4.5)


def test_weights_make_replicas_dear_and_activations_make_cuts_dear() -> None:
    heavy_weights = pp.partition(chain([4, 4], parameters=1000), pp.Topology(ONE_LEVEL))
    assert [stage.replicas for stage in heavy_weights.stages] == [1, 1]
    heavy_activations = pp.partition(chain([4, 4], activations=1000), pp.Topology(ONE_LEVEL))
    assert [stage.replicas for stage in heavy_activations.stages] == [4]


def test_devices_stay_idle_where_more_would_be_slower() -> None:
    plan = pp.partition(chain([4], parameters=1000), pp.Topology(ONE_LEVEL))
    assert plan.devices == 1
    assert "3 devices idle" in plan.reason


def test_the_reason_says_what_limits_the_plan_and_what_else_there_was() -> None:
    plan = pp.partition(pp.Profile.from_pipedream(VGG16), pp.Topology([pp.Level("gpu", 4, 1e10)]))
    assert "2 stages on 4 of 4 devices" in plan.reason and "3 replicas" in plan.reason
    others = [other.slowest_seconds for other in plan.runners_up]
    assert others == sorted(others) and others[0] > plan.slowest_seconds
    assert {other.reason for other in plan.runners_up} >= {"a straight pipeline, without replicas", "one device"}


@quick
@given(
    profiles(most=6, is_dag=False), levels([5]), st.sampled_from([1, 2, 9]), st.sampled_from(["pipedream", "overlap"])
)
def test_chains_on_one_level_equal_brute_force(
    profile: pp.Profile, levels: tuple[pp.Level, ...], most: int, cost_model: str
) -> None:
    plan = pp.partition(profile, pp.Topology(levels), max_replicas=most, cost_model=cost_model)
    expected = best(profile, pp.Topology(levels), max_replicas=most, cost_model=cost_model)
    assert plan.slowest_seconds == pytest.approx(expected)


@quick
@given(profiles(most=5, is_dag=True), levels([4]), st.sampled_from([1, 9]))
def test_dags_on_one_level_equal_brute_force(profile: pp.Profile, levels: tuple[pp.Level, ...], most: int) -> None:
    plan = pp.partition(profile, pp.Topology(levels), max_replicas=most)
    assert plan.slowest_seconds == pytest.approx(best(profile, pp.Topology(levels), max_replicas=most))


@quick
@given(
    profiles(most=4, is_dag=True), levels([3, 2]), st.sampled_from([1, 3, 9]), st.sampled_from(["pipedream", "overlap"])
)
def test_nested_levels_equal_brute_force(
    profile: pp.Profile, levels: tuple[pp.Level, ...], most: int, cost_model: str
) -> None:
    plan = pp.partition(profile, pp.Topology(levels), max_replicas=most, cost_model=cost_model)
    expected = best(profile, pp.Topology(levels), max_replicas=most, cost_model=cost_model)
    assert plan.slowest_seconds == pytest.approx(expected)


@quick
@given(
    profiles(most=4, is_dag=True),
    st.one_of(levels([4]), levels([2, 2])),
    st.integers(1, 150),
    st.sampled_from(["1f1b", "gpipe", "pipedream", "pipedream_2bw"]),
    st.sampled_from(["none", "full", "auto"]),
)
def test_plans_within_a_memory_limit_equal_brute_force(
    profile: pp.Profile, levels: tuple[pp.Level, ...], memory: int, schedule: str, recompute: str
) -> None:
    topology = pp.Topology(levels, memory=memory)
    options = {"schedule": schedule, "microbatches": 3, "recompute": recompute}
    expected = best(profile, topology, **options)  # type: ignore[arg-type]
    if expected == float("inf"):
        with pytest.raises(pp.PartitionError, match="memory"):
            pp.partition(profile, topology, **options)  # type: ignore[arg-type]
    else:
        plan = pp.partition(profile, topology, **options)  # type: ignore[arg-type]
        assert plan.slowest_seconds == pytest.approx(expected)
        assert fullest(plan, profile, schedule, 2.0, 3) <= memory


@quick
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.integers(1, 12),
    st.sampled_from(["1f1b", "gpipe", "pipedream", "pipedream_2bw"]),
)
def test_a_replica_holds_its_share_of_what_keeps_all_devices_behind_it_busy(
    replicas: list[int], microbatches: int, schedule: str
) -> None:
    memory = Memory(0.0, 0.0, schedule, "none", microbatches)
    counted = [memory.waiting_on(own, sum(replicas[stage + 1 :])) for stage, own in enumerate(replicas)]
    assert counted == list(held(schedule, tuple(replicas), microbatches))


def test_a_stage_before_a_replicated_one_has_a_version_of_its_weights_for_each_device() -> None:
    # Counted by stages, replicas 1, 3 and 1 seemed to fit; stage 0 held 10 * (5 + 2) bytes.
    layers = tuple(
        pp.LayerProfile(name, s / 3, s * 2 / 3, 0.0, 10.0) for name, s in (("a", 1.0), ("b", 3.0), ("c", 1.0))
    )
    profile, level = pp.Profile(layers), pp.Level("device", 5, 1e9)

    def replicas(memory: float) -> list[int]:
        plan = pp.partition(profile, pp.Topology((level,), memory), schedule="pipedream")
        assert fullest(plan, profile, "pipedream", 2.0, 8) <= memory
        return [stage.replicas for stage in plan.stages]

    assert replicas(70) == [1, 3, 1] and replicas(69) != [1, 3, 1]
    with pytest.raises(pp.PartitionError, match="needs at least 40 bytes"):  # replicas of the first stage share
        pp.partition(profile, pp.Topology((level,), 39), schedule="pipedream")


@pytest.mark.parametrize(("counts", "needed"), [((4,), 9), ((2, 2), 10)])
def test_an_error_says_what_plans_on_these_levels_need(counts: tuple[int, ...], needed: int) -> None:
    # On one level replicas 1 and 3 hold 3 * 1 and 1 * 9 bytes; nested there are no three, and one stage holds 1 + 9.
    profile = pp.Profile((pp.LayerProfile("a", 1.0, 1.0, 1.0, 0.0), pp.LayerProfile("b", 1.0, 1.0, 9.0, 0.0)))
    topology = pp.Topology([pp.Level("x", count, 1e9) for count in counts], memory=needed - 1)
    with pytest.raises(pp.PartitionError, match=f"on 4 devices the fullest needs at least {needed} bytes, 1 more"):
        pp.partition(profile, topology, schedule="gpipe", microbatches=3)


def test_what_a_layer_keeps_counts_for_the_memory_and_its_output_for_the_links() -> None:
    layers = tuple(pp.LayerProfile(name, 1.0, 1.0, 10.0, 0.0, stash_bytes=40.0) for name in "ab")
    level = pp.Level("device", 2, bandwidth=10.0)
    plan = pp.partition(pp.Profile(layers), pp.Topology((level,), memory=80), straight=True)
    assert plan.slowest_seconds == pytest.approx(2) and len(plan.stages) == 2  # 2 * 10 / 10 on each side
    with pytest.raises(pp.PartitionError, match="needs at least 80 bytes"):
        pp.partition(pp.Profile(layers), pp.Topology((level,), memory=79), straight=True)


def test_a_memory_limit_that_no_plan_keeps_says_by_how_much() -> None:
    profile = chain([1, 1], parameters=100)
    assert len(pp.partition(profile, pp.Topology(ONE_LEVEL, memory=300)).stages) == 2
    with pytest.raises(pp.PartitionError, match="needs at least 300 bytes, 1 more than the topology's memory of 299"):
        pp.partition(profile, pp.Topology(ONE_LEVEL, memory=299))


@pytest.mark.parametrize("counts", [(16,), (4, 4)])
def test_where_not_all_cuts_can_be_tried_a_plan_that_fits_is_found_if_there_is_one(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Evenly spaced cuts alone had none between the two layers that do not fit on one device.
    sizes = [1.0] * 40 + [100.0, 100.0] + [1.0] * 40
    profile = pp.Profile(tuple(pp.LayerProfile(f"l{i}", 1.0, 2.0, 0.0, size) for i, size in enumerate(sizes)))
    topology = pp.Topology([pp.Level("x", count, 1e9) for count in counts], memory=3 * 150)
    monkeypatch.setattr(equal_speeds, "MOST_WORK", 2e5)
    plan = pp.partition(profile, topology)
    assert [name for stage in plan.stages for name in stage.layers] == [layer.name for layer in profile.layers]
    assert fullest(plan, profile, "1f1b", 2.0, 8) <= 3 * 150
    assert plan.slowest_seconds >= 82 * 3 / 16


def test_recomputing_stages_keep_less_and_compute_more() -> None:
    profile = chain([3, 3, 3, 3], activations=10)
    topology = pp.Topology((pp.Level("device", 1, 1e9),), memory=45)
    with pytest.raises(pp.PartitionError, match="memory"):
        pp.partition(profile, topology, schedule="gpipe")
    plan = pp.partition(profile, topology, schedule="gpipe", recompute="full")
    assert plan.slowest_seconds == pytest.approx(4 * (1 + 1 + 2))


def test_only_the_stages_that_have_to_recompute_do() -> None:
    profile = chain([3, 3, 3, 3], activations=10)
    topology = pp.Topology((pp.Level("device", 2, 1e9),), memory=35)
    plan = pp.partition(profile, topology, recompute="auto")  # of two micro-batches the first stage would keep 40 bytes
    assert [stage.recompute for stage in plan.stages] == ["full", "none"]
    assert plan.slowest_seconds == pytest.approx(8) and "Stage 0 must recompute to fit the memory" in plan.reason
    enough = pp.Topology((pp.Level("device", 2, 1e9),), memory=40)
    assert [stage.recompute for stage in pp.partition(profile, enough, recompute="auto").stages] == ["none", "none"]


def test_of_equally_fast_schedules_the_one_that_keeps_less_is_chosen() -> None:
    plan = pp.partition(chain([3, 3]), pp.Topology(ONE_LEVEL), straight=True, schedule="auto", microbatches=8)
    assert (plan.schedule, plan.microbatches) == ("1f1b", 8)
    assert plan.step_seconds == pytest.approx(3 * (8 + 1))  # the bubble is one more micro-batch
    assert plan.reason.endswith("A step of 8 micro-batches takes 27 s with 1f1b (gpipe: 27 s).")


@pytest.mark.parametrize("speeds", [None, (1.0, 0.5)])
def test_a_message_has_half_of_the_bandwidth_which_counts_both_ways(speeds: tuple[float, ...] | None) -> None:
    level = pp.Level("device", 2, bandwidth=20.0, latency=0.25, speeds=speeds)
    plan = pp.partition(chain([6, 3], activations=10), pp.Topology((level,)), straight=True, microbatches=1)
    assert len(plan.stages) == 2 and plan.stages[0].boundary_seconds == pytest.approx(2 * 10 / 20 + 2 * 0.25)
    computing = 6 + 3 / (speeds or [1.0])[-1]  # the heavy layer has the fast device
    assert plan.step_seconds == pytest.approx(computing + 2 * (10 / 10 + 0.25))  # the activation, and its gradient


def test_gpipe_is_chosen_where_slow_links_would_make_1f1b_wait_and_memory_allows_it() -> None:
    profile = chain([3] * 4, activations=10)
    level = pp.Level("device", 4, bandwidth=7.0)  # a message takes about half as long as a stage
    plan = pp.partition(profile, pp.Topology((level,)), straight=True, schedule="auto")
    other = pp.partition(profile, pp.Topology((level,)), straight=True, schedule="1f1b")
    assert plan.schedule == "gpipe" and plan.step_seconds is not None and other.step_seconds is not None
    assert plan.step_seconds < other.step_seconds
    little = pp.partition(profile, pp.Topology((level,), memory=45), straight=True, schedule="auto")
    assert little.schedule == "1f1b"


def test_asynchronous_schedules_count_their_weight_versions_and_have_no_bubble() -> None:
    profile = chain([3, 3, 3], parameters=10)
    levels = (pp.Level("device", 3, 1e9),)
    needed = {"1f1b": 10 + 20, "pipedream_2bw": 20 + 20, "pipedream": 30 + 20}
    for schedule, limit in needed.items():
        plan = pp.partition(profile, pp.Topology(levels, memory=limit), straight=True, schedule=schedule)
        assert [len(stage.layers) for stage in plan.stages] == [1, 1, 1]
        assert plan.step_seconds == pytest.approx(3 * (8 + 2 * (schedule == "1f1b")))
        with pytest.raises(pp.PartitionError, match=f"needs at least {limit} bytes"):
            pp.partition(profile, pp.Topology(levels, memory=limit - 1), straight=True, schedule=schedule)


def test_a_schedule_whose_activations_do_not_fit_is_not_chosen_and_the_error_is_that_of_the_thriftiest() -> None:
    profile = chain([3, 3], activations=10)
    assert pp.partition(profile, pp.Topology(ONE_LEVEL, memory=20), schedule="auto").schedule == "1f1b"
    with pytest.raises(pp.PartitionError, match=r"needs at least 20 bytes.* use more devices, recompute='auto'"):
        pp.partition(profile, pp.Topology(ONE_LEVEL, memory=19), schedule="auto")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cost_model": "roofline"}, "cost_model='roofline'"),
        ({"schedule": "zbv"}, "schedule='zbv'"),
        ({"recompute": "all"}, "recompute='all'"),
        ({"max_replicas": 0}, "max_replicas"),
        ({"optimizer_bytes_per_parameter_byte": -1}, "optimizer_bytes_per_parameter_byte"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(pp.PartitionError, match=said):
        pp.partition(chain([1]), pp.Topology(ONE_LEVEL), **options)  # type: ignore[arg-type]


def test_where_one_order_of_a_large_dag_is_searched_an_error_does_not_say_that_nothing_fits() -> None:
    # 2 ** 13 cuts: nine of the small layers against the large one and three others would fit, but not side by side.
    sizes = [1.0] * 6 + [5.0] + [1.0] * 6
    layers = tuple(pp.LayerProfile(f"l{i}", 1.0, 2.0, 0.0, size) for i, size in enumerate(sizes))
    topology = pp.Topology((pp.Level("device", 2, 1e9),), memory=3 * 9)
    with pytest.raises(pp.PartitionError, match=r"no plan that fits was found .*too many places to cut.*at least 33 "):
        pp.partition(pp.Profile(layers, edges=()), topology)


def test_a_tensor_with_many_readers_crosses_once() -> None:
    layers = tuple(pp.LayerProfile(name, 1.0, 1.0, 10.0 if name == "a" else 0.0, 0.0) for name in "abcd")
    profile = pp.Profile(layers, (("a", "b"), ("a", "c"), ("a", "d")))
    plan = pp.partition(profile, pp.Topology([pp.Level("device", 2, bandwidth=20.0)]), straight=True)
    assert max(stage.boundary_seconds for stage in plan.stages) == pytest.approx(1)  # 2 * 10 / 20, not three times that


def test_where_the_states_explode_the_plan_says_how_far_from_the_best_it_may_be() -> None:
    # 15 branches of 3 layers: 4 ** 15 sets of layers that may be done.
    names = [f"b{branch}.{depth}" for branch in range(15) for depth in range(3)]
    edges = [(f"b{b}.{d}", f"b{b}.{d + 1}") for b in range(15) for d in range(2)]
    profile = pp.Profile(tuple(pp.LayerProfile(name, 1.0, 2.0, 1.0, 1.0) for name in names), tuple(edges))
    plan = pp.partition(profile, pp.Topology([pp.Level("device", 4, bandwidth=100.0)]))
    assert 45 * 3 / 4 <= plan.slowest_seconds <= (1 + plan.proven_gap) * 45 * 3 / 4 * 1.000001
    assert 0 < plan.proven_gap < 0.1
    assert "too many places to cut" in plan.reason


def test_a_thousand_layers_on_64_devices_take_seconds() -> None:
    started = time.process_time()
    plan = pp.partition(random_chain(1000), pp.Topology([pp.Level("device", 64, bandwidth=10.0)]))
    assert time.process_time() - started < 5
    assert plan.proven_gap == 0


def test_a_dag_of_the_size_of_resnet_50_takes_seconds() -> None:
    layers, edges, last = [], [], None
    for block in range(44):  # two branches of one and two layers, then their sum
        names = [f"{block}.{part}" for part in ("left", "right1", "right2", "sum")]
        edges += [(last, names[0]), (last, names[1])] if last else []
        edges += [(names[0], names[3]), (names[1], names[2]), (names[2], names[3])]
        layers += [pp.LayerProfile(name, 0.1 + block % 3, 0.2, 1.0 + block % 5, 1.0) for name in names]
        last = names[3]
    started = time.process_time()
    plan = pp.partition(
        pp.Profile(tuple(layers), tuple(edges)),
        pp.Topology([pp.Level("device", 4, bandwidth=10.0), pp.Level("host", 4, bandwidth=1.0)]),
    )
    assert time.process_time() - started < 3
    assert plan.proven_gap == 0


def test_layers_that_take_no_time_are_planned_too() -> None:
    assert pp.partition(chain([0.0] * 25), pp.Topology(ONE_LEVEL)).slowest_seconds == 0
    layers = tuple(pp.LayerProfile(f"l{i}", 0.0, 0.0, 0.0, 1.0) for i in range(300))
    assert pp.partition(pp.Profile(layers), pp.Topology(ONE_LEVEL)).slowest_seconds == 0


def test_with_an_upper_bound_the_search_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from lp_pipe.pipeline.partitioning import equal_speeds

    profile = random_chain(150, seed=3)
    topology = pp.Topology([pp.Level("device", 12, bandwidth=1.0)])
    whole = pp.partition(profile, topology)
    monkeypatch.setattr(equal_speeds, "WINDOWED_STATES", 20)
    assert pp.partition(profile, topology).slowest_seconds == pytest.approx(whole.slowest_seconds)


def test_plans_are_made_without_torch() -> None:
    code = "import sys, lp_pipe.pipeline as pp; pp.partition, pp.Profile, pp.Plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("times_ms", "crossing_bytes", "stage"),
    [
        ([9, 9], 0, None),
        ([9, 0.3], 0, "stage 1 (b) is too short"),  # two actions of 0.1 ms are more than half of it
        ([9, 9], 1e9 * 0.005, "stage 0 (a) is too short"),  # 10 ms each way
        ([9, 9], 1e9 * 0.004, None),  # 8 ms, while the stages compute
        ([9, 0.5, 9], 0, None),
    ],
)
def test_a_stage_that_is_too_short_for_the_engine_is_warned_of(
    times_ms: list[float], crossing_bytes: float, stage: str | None, tmp_path: Path
) -> None:
    profile = chain([time / 1e3 for time in times_ms], activations=crossing_bytes)
    topology = pp.Topology([pp.Level("device", len(times_ms), bandwidth=1e9)])
    if stage is None:
        with warnings.catch_warnings(action="error"):
            assert pp.partition(profile, topology, straight=True).warning == ""
        return
    with pytest.warns(UserWarning, match="too short to be worth a cut") as warned:
        plan = pp.partition(profile, topology, straight=True)
    assert warned[0].filename == __file__
    assert plan.warning.startswith(stage) and "fewer stages" in plan.warning
    plan.save(tmp_path / "plan.toml")
    assert pp.Plan.load(tmp_path / "plan.toml") == plan


def test_the_engines_cost_of_an_action_may_be_given() -> None:
    profile, topology = chain([0.009, 0.009]), pp.Topology([pp.Level("device", 2, bandwidth=1e9)])
    with pytest.warns(UserWarning, match="computes 9 ms for a micro-batch, while .* take 10 ms"):
        pp.partition(profile, topology, straight=True, action_seconds=0.005)
    with pytest.raises(pp.PartitionError, match="action_seconds"):
        pp.partition(profile, topology, action_seconds=-1)


def test_a_plan_is_for_the_micro_batches_of_the_profiled_program(tmp_path: Path) -> None:
    profile, topology = replace(chain([3, 3]), microbatches=5), pp.Topology(ONE_LEVEL)
    profile.save(tmp_path / "profile.json")
    assert pp.Profile.load(tmp_path / "profile.json") == profile
    assert pp.partition(profile, topology).microbatches == 5
    assert pp.partition(profile, topology, microbatches=2).microbatches == 2
    with pytest.raises(pp.PartitionError, match="microbatches"):
        replace(profile, microbatches=0)
