"""The benchmarks run and print what programs expect; what they measure is no test's business."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.engines import namespaces

REPOSITORY = Path(__file__).parents[2]
SCHEDULES = ("gpipe", "1f1b")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def figures(benchmark: str, *options: str) -> dict[str, Any]:
    """Run it as people do; the last line of its output is the JSON object."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--quick", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["benchmark"] == benchmark
    assert result["machine"]["cpus"] >= 1
    return result


def assert_is_spread(values: dict[str, Any]) -> None:
    assert 0 < values["min"] <= values["median"] <= values["max"]
    assert len(values["values"]) >= 2


def test_pipeline_compares_every_party_on_both_models() -> None:
    result = figures("pipeline")
    assert set(result["models"]) == {"mlp", "gpt"}
    parties = {f"{party}/{schedule}" for party in ("lp_pipe", "torch", "limit") for schedule in SCHEDULES}
    for model in result["models"].values():
        assert set(model["parties"]) == {"single", "limit", *parties}
        for party in model["parties"].values():
            assert_is_spread(party["samples_per_s"])
            assert_is_spread(party["step_ms"])
        for schedule in SCHEDULES:
            for other in ("single", "limit", "own_limit", "torch"):
                assert_is_spread(model["ratios"][schedule][f"lp_pipe_to_{other}"])
            assert model["losses"][f"lp_pipe/{schedule}"] == model["losses"]["single"]
        assert set(model["lp_pipe_step_parts_ms"]) == set(SCHEDULES)


def test_pipeline_runs_the_chosen_model_and_microbatches_and_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.pipeline", "--quick", "--models=mlp", "--microbatches=2"]
    subprocess.run([*command, f"--json={path}"], cwd=REPOSITORY, capture_output=True, timeout=280, check=True)
    result = json.loads(path.read_text())
    assert list(result["models"]) == ["mlp"]
    assert result["models"]["mlp"]["microbatches"] == 2


def test_calls_compares_lp_pipe_with_a_bare_socket() -> None:
    parties = figures("calls")["parties"]
    assert {"socket and pickle", "lp_pipe process", "lp_pipe process, inline", "lp_pipe thread"} <= set(parties)
    for party in parties.values():
        assert_is_spread(party["latency_p50_us"])
        assert_is_spread(party["calls_per_s"])


def test_tcp_compares_lp_pipe_with_grpcio() -> None:
    parties = figures("tcp")["parties"]
    assert {"grpcio unary", "lp_pipe, TLS", "lp_pipe, TLS, inline", "lp_pipe, plain gRPC"} <= set(parties)
    for party in parties.values():
        assert_is_spread(party["latency_p50_us"])
        assert_is_spread(party["gigabytes_per_s"])


def test_schedules_compares_makespans_with_theory() -> None:
    parties = figures("schedules", "--schedules=1f1b,zb_h1,zbv", "--workers=2")["parties"]
    assert set(parties) == {"1f1b K=2 M=8", "zb_h1 K=2 M=8", "zbv K=2 M=8"}
    for party in parties.values():
        assert_is_spread(party["measured_ms"])
        assert party["measured_to_theory"]["median"] > 0.98  # the costs are means, which a step may beat
    assert_is_spread(parties["1f1b K=2 M=8"]["torch"]["measured_to_theory"])
    assert parties["zb_h1 K=2 M=8"]["torch"] is None  # it has none


def test_engine_tells_the_cost_of_an_action() -> None:
    parties = figures("engine")["parties"]
    expected = {f"{mode}/{schedule}" for mode in ("process", "thread") for schedule in SCHEDULES}
    assert set(parties) == {"torch alone", *expected}
    for party in parties.values():
        assert_is_spread(party["step_us"]["few"])
        assert_is_spread(party["step_us"]["many"])
        assert "best" in party["action_us"]


def test_simulator_measures_every_part_in_a_process_of_its_own() -> None:
    party = figures("simulator", "--schedules=1f1b")["parties"]["1f1b"]
    assert party["actions"] == 2 * 8 * 32
    assert 0 < party["made_bytes"] <= party["simulated_bytes"]
    for part in ("make_s", "simulate_s", "simulate_cpu_s"):
        assert_is_spread(party[part])


def test_memory_compares_activations_with_the_prediction() -> None:
    parties = figures("memory")["parties"]
    assert {f"2 {schedule} {how}" for schedule in SCHEDULES for how in ("none", "every 2", "full")} < set(parties)
    assert {"2 interleaved none", "2 zbv none", "2 pipedream none", "2 pipedream_2bw none"} < set(parties)
    for party in parties.values():
        assert party["weight_version_bytes"] == party["predicted_weight_version_bytes"]
        assert all(0.9 < ratio < 1.1 for ratio in party["measured_to_predicted"])


def test_pipedream_finds_plans_measures_cuts_and_emulates_links() -> None:
    result = figures("pipedream")
    assert result["search"]["brute_force"]["largest_relative_difference"] == pytest.approx(0, abs=1e-9)
    assert all(search["cpu_s"] > 0 for search in result["search"]["searches"].values())
    for case in result["throughput"].values():
        assert "-".join(map(str, case["planned_cut"])) in case["step_ms"]
        for ratio in ("planned_to_best", "planned_to_equal", "measured_to_predicted"):
            assert_is_spread(case[ratio])
    assert "published" not in result  # PipeDream's own optimizer runs on demand only
    links = result["links"]
    assert "skipped" in links or len(links["slow"]["sent_bytes"]["pipeline"]) == 2


def test_scale_takes_a_launcher_with_many_agents_through_every_phase() -> None:
    (row,) = figures("scale")["rows"]
    assert (row["nodes"], row["hosts"], row["questions"]) == (200, 10, 400)
    for phase in ("plan", "join", "start", "register", "resolve", "idle", "stop"):
        assert row[phase]["wall_s"] > 0
    assert 0 < row["before_mib"] < row["peak_mib"]


@pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "there are hosts")
def test_multihost_measures_calls_throughput_and_start() -> None:
    found = figures("multihost")["figures"]
    assert set(found) == {"calls", "throughput of mlp", "throughput of gpt", "start"}
    for parties in found.values():
        for party in parties.values():
            assert_is_spread(party["figures"])
            assert_is_spread(party["ratio"])


def test_checkpoints_tells_what_they_and_a_killed_stage_cost() -> None:
    result = figures("checkpoints")
    for party in ("none", "async", "blocking"):
        assert_is_spread(result["overhead"]["characters_per_s"][party])
    for kind in ("cost", "cpu_cost"):
        assert len(result["overhead"][kind]["async"]["values"]) == 2
    assert_is_spread(result["overhead"]["pause_ms"])
    assert result["overhead"]["checkpoint_bytes"] > 0
    assert_is_spread(result["recovery"]["startup_s"])
    assert_is_spread(result["recovery"]["recovery_s"])
    assert result["recovery"]["repeated_steps"] == [7, 7]


def test_chaos_compares_every_round_with_the_undisturbed_run(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.chaos", "--rounds=2", "--programs=async,sync", f"--json={path}"]
    subprocess.run(command, cwd=REPOSITORY, capture_output=True, timeout=280, check=True)
    for program in json.loads(path.read_text())["programs"].values():
        assert program["rounds"] == program["same_sha256"] == 1
        assert sum(program["strikes"].values()) >= 1 - program["unstruck"]
        assert program["processes_left"] == 0


def test_endurance_writes_down_what_processes_hold_while_others_are_killed(tmp_path: Path) -> None:
    """Check the report only: growth cannot be seen within seconds."""
    files = [f"--{kind}={tmp_path / 'soak'}.{kind}" for kind in ("csv", "svg", "json")]
    command = [sys.executable, "-m", "benchmarks.endurance", "--seconds=25", "--every=6", *files]
    subprocess.run(command, cwd=REPOSITORY, capture_output=True, timeout=280, check=False)
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["failures"] >= 2
    assert result["is_same"]
    rows = (tmp_path / "soak.csv").read_text().splitlines()
    assert {"launcher_mib", "trainer_threads", "all_descriptors", "shared_mib", "disk_mib"} < set(rows[0].split(","))
    assert len(rows) > 20
    assert (tmp_path / "soak.svg").read_text().count("<polyline") == 15


def test_rl_learning_says_which_agents_reach_their_bars() -> None:
    result = figures("rl_learning")
    assert set(result["tasks"]) == {"catch_dqn", "catch_ppo", "catch_impala"}
    assert all(one["passed"] and one["return"] == 1.0 for (one,) in result["tasks"].values())


def test_rl_replay_compares_every_party_that_is_installed() -> None:
    result = figures("rl_replay")
    for rates in result["rates"].values():
        for values in rates.values():
            assert_is_spread(values)
    assert set(result["missing"]) == {"Ray", "Reverb"} - set(result["rates"])
    assert all(percent < 3.0 for percent in result["growth_percent"].values())
    assert result["checkpoint"]["written_percent"] < 5.0


def test_rl_actors_measures_every_number_of_actors() -> None:
    result = figures("rl_actors")
    assert set(result["steps_per_s"]) == {"AsyncVectorEnv(8)", *(f"rounds, {n} actors" for n in (1, 2, 4, 8))}


def test_telemetry_counts_what_a_hanging_sink_misses() -> None:
    result = figures("telemetry")
    assert result["sink"]["in_file"] == result["sink"]["records"] == 400
    assert "400 records were left out" in result["sink"]["said"][0]
    assert 20 < result["trace"]["bytes_an_event"] <= 200
    assert result["calls"]["clock_us"] <= 1000
    assert result["utilization"]["of_a_step_of_1_ms"] < 0.01
