"""A distributed experiment has the result of one process, whatever the mode is and whatever dies."""

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
import lp_pipe.rl as rl
from lp_pipe.rl.seeding import environment_seed
from lp_pipe.testing import faults
from tests.rl.bandit import Bandit, BanditBuilder, config, gone
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("warm_bare_template")

WITHIN_S = 60.0


def run_distributed(experiment: rl.ExperimentConfig, num_actors: int, mode: str, folder: Path) -> rl.Result:
    program = rl.make_distributed_experiment(experiment, num_actors=num_actors)
    with lp.launch(program, mode=mode, run_dir=folder) as run:
        run.wait(WITHIN_S)
    return rl.load(folder)


def assert_same(found: rl.Result, expected: rl.Result) -> None:
    assert (found.counts, found.curve) == (expected.counts, expected.curve)
    assert found.fingerprint == expected.fingerprint


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("actors", [1, 2, 4])
def test_threads_have_the_result_of_one_process(actors: int, lag: int, no_leaks: None, tmp_path: Path) -> None:
    experiment = config(order=rl.Rounds(steps=8, lag=lag), envs_per_actor=3)
    found = run_distributed(experiment, actors, "thread", tmp_path)
    assert found.counts["env_steps"] == 103
    assert_same(found, rl.run_experiment(experiment, actors))


def numbers_in(folder: Path) -> dict[str, set[str]]:
    """Return the names of what each node has logged."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names: dict[str, set[str]] = {}
    for row in rows:
        names.setdefault(row["node"], set()).update(row["values"])
    return names


def test_one_process_logs_the_metrics_of_a_program(no_leaks: None, tmp_path: Path) -> None:
    run_distributed(config(), 2, "thread", tmp_path / "threads")
    rl.run_experiment(config(), 2, run_dir=tmp_path / "single")
    names = numbers_in(tmp_path / "single")
    assert names == numbers_in(tmp_path / "threads")
    assert set(names) == {"actor/0", "actor/1", "learner/0", "evaluator/0"}
    assert all("env_steps" in of_node for of_node in names.values())
    scores, same = (rl.run_curve(tmp_path / name) for name in ("single", "threads"))
    assert [(point.env_steps, point.value) for point in scores] == [(point.env_steps, point.value) for point in same]


def test_processes_have_the_result_of_one_process(no_leaks: None, tmp_path: Path) -> None:
    experiment = config(envs_per_actor=3)
    assert_same(run_distributed(experiment, 2, "process", tmp_path), rl.run_experiment(experiment, 2))


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_free_order_takes_exactly_its_steps_and_keeps_the_ratio(mode: str, no_leaks: None, tmp_path: Path) -> None:
    experiment = config(order=rl.Free(), max_num_actor_steps=1003, envs_per_actor=3)
    counts = run_distributed(experiment, 4, mode, tmp_path).counts
    assert counts["env_steps"] == counts["inserts"] == 1003
    assert abs(counts["samples"] - 1.5 * (1003 - 10)) <= 4 == counts["samples"] / counts["learner_steps"]


@pytest.mark.parametrize("order", [rl.Rounds(steps=8, lag=2), rl.Free()])
def test_an_experiment_ends_at_the_score(order: rl.Rounds | rl.Free, no_leaks: None, tmp_path: Path) -> None:
    evaluation = rl.Evaluation(every=16, episodes=2, stop_at=3.0)
    experiment = config(evaluation=evaluation, order=order, max_num_actor_steps=10_000_000)
    found = run_distributed(experiment, 2, "thread", tmp_path)
    assert found.score == 3.0 == found.curve[-1][1]
    if isinstance(order, rl.Rounds):
        assert_same(found, rl.run_experiment(experiment, 2))


def make_faulty(fault_at: int, hit: Any, seed: int) -> Bandit:
    """Return the second actor's environment with a fault, and others without."""
    return Bandit(fault_at if seed == environment_seed(0, "environment", 1, 0) else -1, hit)


def nan() -> Any:
    return np.full(1, np.nan, dtype=np.float32)


def wide() -> Any:
    return np.zeros(2, dtype=np.float32)


@pytest.mark.parametrize("order", [rl.Rounds(8), rl.Free()])
@pytest.mark.parametrize(("hit", "leaf"), [(gone, "gone"), (nan, "observation"), (wide, "observation")])
def test_an_environment_that_fails_is_a_short_error_of_its_actor(
    hit: Any, leaf: str, order: rl.Rounds | rl.Free, no_leaks: None, tmp_path: Path
) -> None:
    experiment = config(environment_factory=functools.partial(make_faulty, 8, hit), order=order)
    with pytest.raises(lp.NodeError) as caught:
        run_distributed(experiment, 2, "thread", tmp_path)
    error = caught.value
    assert (error.label, error.index, error.type_name) == ("actor", 1, "EnvironmentFailed")
    seed = environment_seed(0, "actor", 1, 2)
    assert all(text in error.report for text in ("actor/1", "episode 2", "step 1", str(seed), leaf))
    assert len(error.report.splitlines()) <= 15


def test_an_environment_that_fails_is_made_anew_and_counted(no_leaks: None, tmp_path: Path) -> None:
    make = functools.partial(make_faulty, 8, gone)
    experiment = config(environment_factory=make, on_environment_error="restart")
    found = run_distributed(experiment, 2, "thread", tmp_path)
    assert found.counts["environment_restarts"] == 1 and found.counts["env_steps"] == 103
    assert_same(found, rl.run_experiment(experiment, 2))


class Buggy(BanditBuilder):
    """A builder whose policies raise so many times, at a step of all actors."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def make_policy(self, network: Any, spec: rl.Spec, evaluation: bool) -> Any:
        policy = super().make_policy(network, spec, evaluation)

        def buggy(observations: Any, state: Any, generator: Any, counts: Any) -> Any:
            if not evaluation and counts["actor_steps"] == 20 and self.times:
                self.times -= 1
                raise KeyError("a bug")
            return policy(observations, state, generator, counts)

        return buggy


def test_an_actor_that_raises_once_is_started_again_and_one_that_raises_twice_fails(
    no_leaks: None, tmp_path: Path
) -> None:
    found = run_distributed(config(Buggy(1)), 1, "thread", tmp_path / "once")
    assert_same(found, rl.run_experiment(config(Buggy(0)), 1))
    with pytest.raises(lp.NodeError) as caught:
        run_distributed(config(Buggy(9)), 1, "thread", tmp_path / "twice")
    assert (caught.value.label, caught.value.type_name) == ("actor", "DiesRepeatedly")
    assert all(text in caught.value.report for text in ("round 3", "a bug"))


def make_none(seed: int) -> Bandit:
    """Return the second actor's environment in vain, and others."""
    return gone() if seed == environment_seed(0, "environment", 1, 0) else Bandit()


class Imported(BanditBuilder):
    """A builder that other processes cannot unpickle."""

    def __init__(self) -> None:
        super().__init__()
        self.pid = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.getpid() != state["pid"]:
            raise ModuleNotFoundError("No module named 'elsewhere'")
        self.__dict__.update(state)


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_an_environment_that_cannot_be_made_twice_is_a_failure(mode: str, no_leaks: None, tmp_path: Path) -> None:
    with pytest.raises(lp.NodeError) as caught:
        run_distributed(config(environment_factory=make_none), 2, mode, tmp_path)
    error = caught.value
    assert (error.label, error.index, error.type_name) == ("actor", 1, "DiesRepeatedly") and "gone" in error.report


@pytest.mark.slow
def test_a_part_that_cannot_be_unpickled_is_a_failure(no_leaks: None, tmp_path: Path) -> None:
    with pytest.raises(lp.NodeError) as caught:
        run_distributed(config(Imported()), 1, "process", tmp_path)
    assert caught.value.type_name == "ModuleNotFoundError" and "elsewhere" in caught.value.report


def test_a_hanging_environment_is_named_in_the_report_of_hangs(no_leaks: None, tmp_path: Path) -> None:
    waiting_s = 3.0
    make = functools.partial(make_faulty, 8, lambda: (time.sleep(waiting_s), np.zeros(1, dtype=np.float32))[1])
    program = rl.make_distributed_experiment(config(environment_factory=make), num_actors=2)
    with lp.launch(program, mode="thread", run_dir=tmp_path, hang_after=0.5) as run:
        log = tmp_path / "hangs.log"
        until(lambda: log.exists() and "environment 0" in log.read_text())
        run.wait(WITHIN_S)
    line = next(one for one in log.read_text().splitlines() if "environment 0" in one)
    seed = environment_seed(0, "actor", 1, 2)
    assert all(text in line for text in ("actor/1", "episode 2", str(seed)))


@pytest.mark.parametrize(
    "pair", [("actor", "learner"), ("actor", "replay"), ("learner", "counter"), ("learner", "replay")]
)
def test_lost_connections_do_not_change_the_result(pair: tuple[str, str], no_leaks: None, tmp_path: Path) -> None:
    experiment = config(max_num_actor_steps=403, checkpoint_every=20)
    with faults.enabled():
        program = rl.make_distributed_experiment(experiment, num_actors=2)
        with lp.launch(program, mode="thread", run_dir=tmp_path) as run:
            counter = run.client("counter")
            for moment in (60, 200):
                until(lambda moment=moment: counter.get().get("env_steps", 0) >= moment)
                faults.cut(run, *pair)
            run.wait(WITHIN_S)
    assert_same(rl.load(tmp_path), rl.run_experiment(experiment, 2))


class SlowBandit(Bandit):
    """Takes its time, so that a test can kill nodes meanwhile."""

    def step(self, action: Any) -> Any:
        time.sleep(0.01)
        return super().step(action)


def make_slow(seed: int) -> Bandit:
    return SlowBandit()


def test_killed_nodes_do_not_change_the_result(no_leaks: None, tmp_path: Path) -> None:
    experiment = config(max_num_actor_steps=253, checkpoint_every=20, environment_factory=make_slow, envs_per_actor=3)
    program = rl.make_distributed_experiment(experiment, num_actors=2)
    with lp.launch(program, mode="process", run_dir=tmp_path) as run:
        counter = run.client("counter")
        for moment, node in ((60, ("actor", 1)), (120, "replay")):
            until(lambda moment=moment: _env_steps(counter) >= moment)
            faults.kill(run, node)
        run.wait(WITHIN_S)
    found = rl.load(tmp_path)
    assert found.counts["env_steps"] == found.counts["inserts"] == 253
    quick = config(max_num_actor_steps=253, checkpoint_every=20, envs_per_actor=3)
    assert_same(found, rl.run_experiment(quick, 2))


def _env_steps(counter: Any) -> int:
    try:
        return int(counter.get().get("env_steps", 0))
    except lp.Unavailable:
        return 0


@pytest.mark.parametrize("order", [rl.Rounds(steps=8, lag=1), rl.Free()])
def test_an_inference_node_acts_for_all_actors(order: rl.Rounds | rl.Free, no_leaks: None, tmp_path: Path) -> None:
    sizes: list[int] = []

    class Sized(BanditBuilder):
        def make_policy(self, network: Any, spec: rl.Spec, evaluation: bool) -> Any:
            policy = super().make_policy(network, spec, evaluation)

            def sized(observations: Any, *others: Any) -> Any:
                sizes.extend([] if evaluation else [len(observations)])
                return policy(observations, *others)

            return sized

    experiment = config(Sized(), order=order, envs_per_actor=2)
    program = rl.make_distributed_experiment(experiment, num_actors=3, inference=rl.Inference(timeout=0.02))
    with lp.launch(program, mode="thread", run_dir=tmp_path) as run:
        run.wait(WITHIN_S)
    found = rl.load(tmp_path)
    assert found.counts["env_steps"] == found.counts["inserts"] == 103 and found.score == 3.0
    assert max(sizes) == 6 and set(sizes) <= {2, 4, 6}
