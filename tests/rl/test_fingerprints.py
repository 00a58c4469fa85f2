"""An experiment in rounds has one fingerprint: in one process, in threads, in processes and on two hosts."""

import importlib
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
import lp_pipe.rl as rl
from tests.rl.bandit import config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WITHIN_S = 280.0  # twelve processes that load torch, on a busy machine


def make_experiment(agent: str, order: rl.Rounds) -> rl.ExperimentConfig:
    """Return a short experiment, whose agent learns from the first rounds on."""
    options: dict[str, Any] = {"order": order, "envs_per_actor": 2, "checkpoint_every": 20}
    if agent == "bandit":
        return config(**options)
    pytest.importorskip("torch")
    options["evaluation"] = rl.Evaluation(every=120, episodes=2)
    catch = importlib.import_module("examples.catch_dqn").make_catch
    builder: Any = rl.PPOBuilder(rl.PPOConfig(rollout_length=16, batch_size=4))
    environment: Any = "CartPole-v1"
    if agent == "dqn":
        builder, environment = rl.DQNBuilder(rl.DQNConfig(batch_size=16, min_replay_size=32)), catch
    if agent == "impala":
        settings = rl.IMPALAConfig(lstm=8, sequence_length=9, samples_per_insert=16.0, max_queue_size=100)
        builder, environment = rl.IMPALABuilder(settings), catch
    if agent == "sac":
        builder, environment = rl.SACBuilder(rl.SACConfig(batch_size=16, min_replay_size=32)), "Pendulum-v1"
    return rl.ExperimentConfig(builder, environment, 300, **options)


@pytest.mark.parametrize(
    ("agent", "actors", "lag"),
    [
        *(("bandit", actors, lag) for actors in (1, 2, 4) for lag in (0, 1)),
        *(("dqn", 4, 1), ("ppo", 2, 0), ("impala", 2, 1), ("sac", 1, 1)),
    ],
)
def test_an_agent_has_one_fingerprint_however_it_is_distributed(
    agent: str, actors: int, lag: int, no_leaks: None, tmp_path: Path
) -> None:
    experiment = make_experiment(agent, rl.Rounds(steps=16, lag=lag))
    expected = rl.run_experiment(experiment, actors)
    assert expected.counts["env_steps"] == experiment.max_num_actor_steps and expected.counts["learner_steps"] > 0
    modes: dict[str, dict[str, Any]] = {"thread": {}, "process": {}, "multi_host": {"hosts": "2"}}
    for mode, options in modes.items():
        program = rl.make_distributed_experiment(experiment, actors)
        with lp.launch(program, mode, run_dir=tmp_path / mode, **options) as run:
            run.wait(WITHIN_S)
        found = rl.load(tmp_path / mode)
        assert (found.counts, found.curve) == (expected.counts, expected.curve)
        assert found.fingerprint == expected.fingerprint, mode
