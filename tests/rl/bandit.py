"""A small experiment without torch, for tests: a bandit, whose learner keeps the mean reward of each action."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lp_pipe.rl as rl

gym = pytest.importorskip("gymnasium")


def gone() -> Any:
    raise OSError("gone")


class Bandit(gym.Env):
    """Pays for action 1; each episode has three steps, and `fault_at` is the step that fails.

    hit: what happens then; what it returns is the step's observation.
    """

    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, fault_at: int = -1, hit: Callable[[], Any] = gone) -> None:
        self.fault_at, self.hit, self.total = fault_at, hit, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        self.total += 1
        observation = self.hit() if self.total == self.fault_at else self._observed()
        return observation, float(action), self.time == 3, False, {}

    def _observed(self) -> Any:
        return self.np_random.random(1).astype(np.float32)


class Preference:
    """A network of numpy: the preference of each action."""

    def __init__(self) -> None:
        self.values = np.zeros(2)

    def state_dict(self) -> Any:
        return {"values": self.values}

    def load_state_dict(self, state_dict: Any) -> None:
        self.values = np.array(state_dict["values"])


class BanditBuilder:
    """Learns the mean reward of each action. counts_seen: what the policies got."""

    batch_size = 4

    def __init__(self, table: rl.Table | None = None) -> None:
        limiter = rl.SampleToInsertRatio(1.5, 10, 100.0)
        self.table = table or rl.Table(1_000, rl.Prioritized(), rate_limiter=limiter)
        self.counts_seen: list[dict[str, int]] = []

    def make_network(self, spec: rl.Spec) -> Preference:
        return Preference()

    def make_replay_table(self, spec: rl.Spec) -> rl.Table:
        return self.table

    def make_adder(self, spec: rl.Spec) -> Any:
        return rl.NStepAdder(2, 0.9)

    def make_policy(self, network: Preference, spec: rl.Spec, evaluation: bool) -> Any:
        def policy(observations: Any, state: Any, generator: np.random.Generator, counts: Any) -> Any:
            best = np.full(len(observations), int(network.values[1] > network.values[0]))
            if evaluation:
                return best, state, None
            self.counts_seen.append(dict(counts))
            return np.where(generator.random(len(best)) < 0.5, generator.integers(2, size=len(best)), best), state, None

        return policy

    def make_learner(self, network: Preference, spec: rl.Spec, generator: np.random.Generator) -> Any:
        return BanditLearner(network)


class BanditLearner:
    def __init__(self, network: Preference) -> None:
        self.network = network

    def step(self, sample: rl.Sample) -> rl.Update:
        errors = sample.data.reward - self.network.values[sample.data.action]
        for action, error in zip(sample.data.action, errors, strict=True):
            self.network.values[action] += 0.1 * error
        return rl.Update(np.abs(errors))

    def variables(self) -> Any:
        return self.network.state_dict()

    def state_dict(self) -> Any:
        return self.network.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.network.load_state_dict(state)


def config(builder: Any = None, **options: Any) -> rl.ExperimentConfig:
    settings: dict[str, Any] = {
        "environment_factory": lambda seed: Bandit(),
        "max_num_actor_steps": 103,
        "evaluation": rl.Evaluation(every=40, episodes=4),
        "order": rl.Rounds(steps=8, lag=1),
    }
    return rl.ExperimentConfig(builder or BanditBuilder(), **{**settings, **options})
