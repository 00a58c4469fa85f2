"""Each agent learns a small task, has the same result each time, and goes on from its state with the same bits."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
import lp_pipe.rl as rl
from lp_pipe.rl.adders import Sequence
from lp_pipe.rl.replay.table import TableState
from lp_pipe.rl.results import fingerprint_of

gym = pytest.importorskip("gymnasium")
torch = pytest.importorskip("torch")


class Aim(gym.Env):
    """Pays most where the action is the side of the target, or the target itself; episodes are cut off or end."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, action_space: Any) -> None:
        self.action_space = action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time, self.length = 0, int(self.np_random.integers(2, 7))
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        if self.action_space.shape:
            reward = 1.0 - float(abs(action[0] / 3.0 - self.target[0]))
        else:
            reward = float((self.target[0] > 0) == action)
        self.time += 1
        is_last = self.time == self.length
        return self._observed(), reward, is_last and self.length % 2 == 0, is_last and self.length % 2 == 1, {}

    def _observed(self) -> Any:
        self.target = self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)
        return self.target


DISCRETE, BOX = gym.spaces.Discrete(2), gym.spaces.Box(-3.0, 3.0, (1,), np.float32)
PPO = rl.PPOConfig(rollout_length=4, batch_size=16, epochs=4, discount=0.5, learning_rate=1e-2)
IMPALA = rl.IMPALAConfig(sequence_length=4, samples_per_insert=4.0, discount=0.5, learning_rate=1e-2)
SAC = rl.SACConfig(
    discount=0.5,
    samples_per_insert=16.0,
    batch_size=32,
    min_replay_size=100,
    learning_rate=1e-2,
    random_steps=100,
    width=32,
)
AGENTS: dict[str, tuple[Any, Any, int]] = {
    "impala": (rl.IMPALABuilder(IMPALA), DISCRETE, 1_000),
    "impala with lstm": (
        rl.IMPALABuilder(dataclasses.replace(IMPALA, lstm=8, samples_per_insert=1.0)),
        DISCRETE,
        4_000,
    ),
    "ppo": (rl.PPOBuilder(PPO), DISCRETE, 1_000),
    "ppo of a box": (rl.PPOBuilder(PPO), BOX, 1_500),
    "sac": (rl.SACBuilder(SAC), BOX, 600),
}


def experiment(agent: str, steps: int | None = None, **options: Any) -> rl.ExperimentConfig:
    builder, space, enough = AGENTS[agent]
    settings: dict[str, Any] = {
        "builder": builder,
        "environment_factory": lambda seed: Aim(space),
        "evaluation": rl.Evaluation(every=10_000, episodes=20),
        "order": rl.Rounds(steps=64, lag=0),
        "envs_per_actor": 4,
        **options,
    }
    return rl.ExperimentConfig(max_num_actor_steps=steps or enough, **settings)


@pytest.mark.parametrize("agent", ["impala", "ppo", "ppo of a box", "sac"])
def test_an_agent_learns(agent: str) -> None:
    result = rl.run_experiment(experiment(agent))
    mean_length = 4.0
    assert result.score > 0.85 * mean_length
    assert result.counts["learner_steps"] > 0


@pytest.mark.parametrize("agent", AGENTS)
def test_two_runs_have_the_same_fingerprint(agent: str) -> None:
    evaluation = rl.Evaluation(every=100, episodes=2)
    one = experiment(agent, 170, evaluation=evaluation)
    results = [rl.run_experiment(dataclasses.replace(one, seed=seed), num_actors=2) for seed in (0, 0, 1)]
    assert results[0].fingerprint == results[1].fingerprint != results[2].fingerprint
    assert results[0].counts["env_steps"] == 170 and results[0].counts["learner_steps"] > 0


@pytest.mark.parametrize("agent", AGENTS)
def test_a_learner_goes_on_from_its_state(agent: str) -> None:
    builder, space, _ = AGENTS[agent]
    spec = rl.Spec(Aim.observation_space, space, 0.5)
    loop = rl.EnvironmentLoop(
        [Aim(space)] * 2, builder.make_policy(builder.make_network(spec), spec, False), builder.make_adder(spec)
    )
    table = TableState(builder.make_replay_table(spec), np.random.default_rng(0))
    table.insert(loop.run(num_steps=300).items)
    samples = [table.sample(16) for _ in range(2)]
    learners = [builder.make_learner(builder.make_network(spec), spec, np.random.default_rng(s)) for s in (1, 2)]
    learners[0].step(samples[0])
    learners[1].load_state_dict(copy.deepcopy(learners[0].state_dict()))
    for learner in learners:
        learner.step(samples[1])
    assert fingerprint_of(learners[0].state_dict()) == fingerprint_of(learners[1].state_dict())


@pytest.mark.parametrize("agent", AGENTS)
def test_a_network_that_does_not_fit_is_refused(agent: str) -> None:
    builder, space, _ = AGENTS[agent]
    larger = gym.spaces.Box(-3.0, 3.0, (5,), np.float32) if space.shape else gym.spaces.Discrete(5)
    network = builder.make_network(rl.Spec(Aim.observation_space, larger, 0.5))
    with pytest.raises(ValueError, match="5"):
        rl.run_experiment(experiment(agent, network_factory=lambda spec: network))
    for unfit in (gym.spaces.MultiBinary(2), gym.spaces.Discrete(2, start=1)):
        with pytest.raises(ValueError):
            builder.make_network(rl.Spec(Aim.observation_space, unfit, 0.5))


def test_ppo_takes_a_vectorised_environment() -> None:
    def make(seed: int) -> Any:
        return gym.vector.SyncVectorEnv([lambda: Aim(BOX)] * 4)

    one = experiment("ppo of a box", 250, environment_factory=make)
    assert rl.run_experiment(one).counts["env_steps"] == 248


def test_a_queue_that_dropped_rollouts_learns_from_those_that_are_left() -> None:
    builder = rl.PPOBuilder(rl.PPOConfig(rollout_length=2, batch_size=8, max_queue_size=8, epochs=1))
    result = rl.run_experiment(experiment("ppo", 256, builder=builder))
    assert result.counts["learner_steps"] == 4 == result.counts["samples"] / 8


@pytest.mark.parametrize("agent", ["ppo", "impala", "impala with lstm"])
def test_padding_does_not_change_what_is_learned(agent: str) -> None:
    builder, space, _ = AGENTS[agent]
    spec = rl.Spec(Aim.observation_space, space, 0.5)
    network = builder.make_network(spec)
    policy = builder.make_policy(network, spec, False)
    state = policy.initial_state(8) if agent == "impala with lstm" else None
    numbers = np.random.default_rng(3)
    actions, logs = numbers.integers(2, size=(8, 4)), np.full((8, 4), -0.7, np.float32)
    extras = {"drawn": actions, "log_probability": logs} if agent == "ppo" else logs
    rewards, discounts = numbers.random((8, 4), dtype=np.float32), np.full((8, 4), 0.5, np.float32)
    observations, mask = numbers.random((8, 5, 2), dtype=np.float32), np.ones((8, 4), np.float32)
    items = Sequence(observations, actions, rewards, discounts, mask, None, extras)

    def padded(leaf: Any) -> Any:
        return np.concatenate([leaf, np.zeros((8, 3, *leaf.shape[2:]), leaf.dtype)], axis=1)

    found = []
    for data in (items, rl.tree.tree_map(padded, items)):
        learner = builder.make_learner(copy.deepcopy(network), spec, np.random.default_rng(0))
        learner.step(rl.Sample(None, None, None, None, data._replace(state=state)))
        found.append(learner.variables())
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-6)


def test_a_recurrent_agent_as_a_program_has_the_same_fingerprint(tmp_path: Path) -> None:
    one = experiment("impala with lstm", 170, evaluation=rl.Evaluation(every=100, episodes=2))
    lp.launch(rl.make_distributed_experiment(one, num_actors=2), "thread", run_dir=tmp_path / "run").wait(60.0)
    assert rl.load(tmp_path / "run").fingerprint == rl.run_experiment(one, num_actors=2).fingerprint
