"""A problem for evolution strategies: gymnasium's CartPole-v1, with a policy of one hidden layer or none."""

import numpy as np

from lp_pipe.programs.evolution import Vector
from lp_pipe.programs.options import require

_NUM_OBSERVATIONS = 4
_EVALUATION_SEED = 10**6


class CartPole:
    """The problem of keeping the pole up for at most 500 steps; the return is the number of steps."""

    def __init__(self, num_hidden: int = 8, num_evaluation_episodes: int = 100) -> None:
        self._num_hidden = num_hidden
        self._num_evaluation_episodes = num_evaluation_episodes
        self._environment = require("gymnasium", "gymnasium").make("CartPole-v1", disable_env_checker=True)

    @property
    def num_parameters(self) -> int:
        inputs = _NUM_OBSERVATIONS + 1  # and a bias
        return inputs * self._num_hidden + self._num_hidden + 1 if self._num_hidden else inputs

    def try_out(self, parameters: Vector, seed: tuple[int, ...]) -> float:
        return self._play(parameters, int(np.random.default_rng(seed).integers(2**31)))

    def evaluate(self, parameters: Vector) -> float:
        """Return the mean return of a fixed set of episodes."""
        episodes = range(self._num_evaluation_episodes)
        return float(np.mean([self._play(parameters, _EVALUATION_SEED + episode) for episode in episodes]))

    def _play(self, parameters: Vector, seed: int) -> float:
        observation, _ = self._environment.reset(seed=seed)
        total, is_over = 0.0, False
        while not is_over:
            observation, reward, has_fallen, is_late, _ = self._environment.step(self._act(parameters, observation))
            total += float(reward)
            is_over = has_fallen or is_late
        return total

    def _act(self, parameters: Vector, observation: Vector) -> int:
        inputs = np.append(observation, 1.0)
        if not self._num_hidden:
            return int(parameters @ inputs > 0)
        split = len(inputs) * self._num_hidden
        hidden = np.tanh(parameters[:split].reshape(self._num_hidden, -1) @ inputs)
        return int(parameters[split:-1] @ hidden + parameters[-1] > 0)
