"""DQN: double Q-learning with returns of n steps and prioritized replay.

Sources: Mnih et al., "Human-level control through deep reinforcement learning" (2015); van Hasselt, Guez and Silver,
"Deep Reinforcement Learning with Double Q-learning" (2016); Schaul et al., "Prioritized Experience Replay" (2016).
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lp_pipe.rl.adders import NStepAdder
from lp_pipe.rl.agents.networks import (
    FlatObservation,
    TorchLearner,
    check_shape,
    num_actions_of,
    one_observation,
    perceptron,
    tensors,
)
from lp_pipe.rl.experiment import Spec, Update
from lp_pipe.rl.losses import double_q
from lp_pipe.rl.replay.rate_limiter import SampleToInsertRatio
from lp_pipe.rl.replay.selectors import Prioritized, Uniform
from lp_pipe.rl.replay.table import Sample, Table


@dataclass(frozen=True)
class DQNConfig:
    """The options of DQN.

    error_buffer: of the rate limiter; None: the samples of 100 inserts, or a batch if that is more. target_every:
    learner steps between two copies to the target network. epsilon: share of random actions, which falls to this from
    1 over the first epsilon_steps environment steps.
    """

    n_step: int = 3
    discount: float = 0.99
    samples_per_insert: float = 32.0
    batch_size: int = 64
    min_replay_size: int = 500
    max_replay_size: int = 100_000
    error_buffer: float | None = None
    learning_rate: float = 1e-3
    target_every: int = 100
    prioritized: bool = True
    clip_rewards: bool = False
    epsilon: float = 0.05
    epsilon_steps: int = 2_000

    def __post_init__(self) -> None:
        """Raises:
        ValueError: a number is out of range.
        """
        if min(self.batch_size, self.target_every, self.epsilon_steps) < 1 or not 0.0 <= self.epsilon <= 1.0:
            raise ValueError(
                "DQNConfig: batch_size, target_every and epsilon_steps must be at least 1 and epsilon in [0, 1], got "
                f"{self.batch_size}, {self.target_every}, {self.epsilon_steps} and {self.epsilon}"
            )


class DQNBuilder:
    """Makes the parts of DQN. Network: from observations [B, …] to the values of the actions [B, A]."""

    def __init__(self, config: DQNConfig | None = None) -> None:
        self.config = config or DQNConfig()
        self.batch_size = self.config.batch_size
        self.discount = self.config.discount

    def make_network(self, spec: Spec) -> nn.Module:
        """Return a network of two hidden layers for an observation that is one array.

        Raises:
            ValueError: the observation is a tree.
        """
        return QNetwork(spec)

    def make_replay_table(self, spec: Spec) -> Table:
        config = self.config
        per_insert = config.samples_per_insert
        error_buffer = config.error_buffer
        if error_buffer is None:
            error_buffer = max(100.0 * per_insert, float(config.batch_size))
        limiter = SampleToInsertRatio(per_insert, config.min_replay_size, error_buffer)
        sampler = Prioritized() if config.prioritized else Uniform()
        return Table(config.max_replay_size, sampler, rate_limiter=limiter)

    def make_adder(self, spec: Spec) -> NStepAdder:
        return NStepAdder(self.config.n_step, self.config.discount)

    def make_policy(self, network: nn.Module, spec: Spec, evaluation: bool) -> "DQNPolicy":
        return DQNPolicy(network, num_actions_of(spec), self.config, evaluation)

    def make_learner(self, network: nn.Module, spec: Spec, generator: np.random.Generator) -> "DQNLearner":
        """Return a learner.

        Raises:
            ValueError: the network does not return the values of all actions.
        """
        with torch.no_grad():
            values = network(one_observation(spec))
        check_shape("values of actions", values, (1, num_actions_of(spec)), spec.action_space)
        return DQNLearner(network, self.config, generator)


class QNetwork(nn.Module):
    """Two hidden layers over the flat observation."""

    def __init__(self, spec: Spec, width: int = 64) -> None:
        super().__init__()
        self.flat = FlatObservation(spec.observation_space)
        self.layers = perceptron([self.flat.size, width, width, num_actions_of(spec)])

    def forward(self, observations: Tensor) -> Tensor:
        values: Tensor = self.layers(self.flat(observations))
        return values


class DQNPolicy:
    """Takes the best action, and in acting a random one at times."""

    def __init__(self, network: nn.Module, num_actions: int, config: DQNConfig, evaluation: bool) -> None:
        self._network, self._num_actions, self._config = network, num_actions, config
        self._evaluation = evaluation

    def __call__(
        self, observations: Any, state: Any, generator: np.random.Generator, counts: Mapping[str, int]
    ) -> tuple[Any, Any, Any]:
        with torch.no_grad():
            actions = self._network(tensors(observations)).argmax(-1).numpy()
        if not self._evaluation:
            share = min(1.0, counts["env_steps"] / self._config.epsilon_steps)
            is_random = generator.random(len(actions)) < 1.0 - (1.0 - self._config.epsilon) * share
            actions = np.where(is_random, generator.integers(self._num_actions, size=len(actions)), actions)
        return actions, state, None


class DQNLearner(TorchLearner):
    """Minimizes the Huber loss of double Q-learning's errors, which are also the priorities."""

    def __init__(self, network: nn.Module, config: DQNConfig, generator: np.random.Generator) -> None:
        self._target, self._config = copy.deepcopy(network), config
        self._optimizer = torch.optim.Adam(network.parameters(), lr=config.learning_rate)
        super().__init__(network, generator, {"target": self._target, "optimizer": self._optimizer})

    def step(self, sample: Sample) -> Update:
        data = sample.data
        rewards = torch.as_tensor(data.reward)
        if self._config.clip_rewards:
            rewards = rewards.clamp(-1.0, 1.0)
        following = tensors(data.next_observation)
        q = self.network(tensors(data.observation))
        with torch.no_grad():
            online, target = self.network(following), self._target(following)
        actions, discounts = torch.as_tensor(data.action), torch.as_tensor(data.discount)
        errors = double_q(q, actions, rewards, discounts, online, target)
        losses = nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")
        loss = (torch.as_tensor(sample.weights, dtype=losses.dtype) * losses).mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.steps += 1
        if self.steps % self._config.target_every == 0:
            self._target.load_state_dict(self.network.state_dict())
        priorities = errors.detach().abs().numpy() + 1e-6 if self._config.prioritized else None
        return Update(priorities, {"loss": float(loss.detach())})
