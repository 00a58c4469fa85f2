"""A distributed experiment has the result of one process, whatever the mode is and whatever dies."""

from pathlib import Path

import pytest

import lp_pipe as lp
import lp_pipe.rl as rl
from tests.rl.bandit import config

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
