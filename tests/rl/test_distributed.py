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
