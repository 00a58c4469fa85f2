"""A short experiment of each agent, which learns from the first rounds on. Bandit's needs no torch."""

import importlib
from typing import Any

import pytest

import lp_pipe.rl as rl
from tests.rl.bandit import config

TORCH_AGENTS = ("dqn", "ppo", "impala", "sac")


def make_experiment(agent: str, order: rl.Rounds) -> rl.ExperimentConfig:
    """Return the experiment of an agent: bandit, or one of TORCH_AGENTS."""
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
