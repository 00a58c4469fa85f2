"""SAC: off-policy learning of a random policy that is paid for its entropy, for continuous actions.

Sources: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018), with the temperature of section 5;
Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods" (2018), for the two critics.
"""

import copy
import math
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
    box_of,
    check_shape,
    one_observation,
    perceptron,
    scaled_to,
    tensors,
)
from lp_pipe.rl.experiment import Spec, Update
from lp_pipe.rl.replay.rate_limiter import SampleToInsertRatio
from lp_pipe.rl.replay.selectors import Uniform
from lp_pipe.rl.replay.table import Sample, Table
from lp_pipe.rl.tree import tree_map

LOG_STD_RANGE = (-20.0, 2.0)


@dataclass(frozen=True)
class SACConfig:
    """The options of SAC.

    samples_per_insert: None: the batch size, that is one step of the learner for each of the environment. tau: share of
    the critics that their targets take over at each step. target_entropy: None: minus the number of action values.
    random_steps: environment steps with uniform actions, at first. width: of two hidden layers.
    """

    n_step: int = 1
    discount: float = 0.99
    samples_per_insert: float | None = None
    batch_size: int = 256
    min_replay_size: int = 500
    max_replay_size: int = 100_000
    learning_rate: float = 1e-3
    tau: float = 0.005
    target_entropy: float | None = None
    random_steps: int = 500
    width: int = 128

    def __post_init__(self) -> None:
        """Raises:
        ValueError: a number is out of range.
        """
        if min(self.batch_size, self.width) < 1 or not 0.0 < self.tau <= 1.0:
            raise ValueError(
                "SACConfig: batch_size and width must be at least 1 and tau in (0, 1], got "
                f"{self.batch_size}, {self.width} and {self.tau}"
            )


class SACBuilder:
    """Makes the parts of SAC. Network: a module with `actor`, from observations [B, …] to (mean, log_std), each [B, A].

    Its `critics` go from observations and actions [B, A], between -1 and 1, to two values of each [2, B].
    """

    def __init__(self, config: SACConfig | None = None) -> None:
        self.config = config or SACConfig()
        self.batch_size = self.config.batch_size
        self.discount = self.config.discount

    def make_network(self, spec: Spec) -> "ActorAndCritics":
        """Return an actor and two critics for an observation that is one array.

        Raises:
            ValueError: the observation is a tree, or the actions are not a Box.
        """
        return ActorAndCritics(spec, self.config.width)

    def make_replay_table(self, spec: Spec) -> Table:
        config = self.config
        per_insert = float(config.batch_size) if config.samples_per_insert is None else config.samples_per_insert
        error_buffer = max(100.0 * per_insert, float(config.batch_size))
        limiter = SampleToInsertRatio(per_insert, config.min_replay_size, error_buffer)
        return Table(config.max_replay_size, Uniform(), rate_limiter=limiter)

    def make_adder(self, spec: Spec) -> NStepAdder:
        return NStepAdder(self.config.n_step, self.config.discount)

    def make_policy(self, network: Any, spec: Spec, evaluation: bool) -> "SACPolicy":
        return SACPolicy(network, box_of(spec), 0 if evaluation else self.config.random_steps, evaluation)

    def make_learner(self, network: Any, spec: Spec, generator: np.random.Generator) -> "SACLearner":
        """Return a learner.

        Raises:
            ValueError: the network does not return mean, log_std and two values.
        """
        observation, size = one_observation(spec), math.prod(box_of(spec).shape)
        with torch.no_grad():
            for one in network.actor(observation):
                check_shape("parameters of actions", one, (1, size), spec.action_space)
            values = network.critics(observation, torch.zeros(1, size))
        check_shape("values", values, (2, 1), spec.observation_space)
        entropy = self.config.target_entropy
        return SACLearner(network, -float(size) if entropy is None else entropy, self.config, generator)


class GaussianActor(nn.Module):
    """From observations to mean and log of the deviation of the actions, before they are squashed."""

    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.flat = FlatObservation(spec.observation_space)
        self.layers = perceptron([self.flat.size, width, width, 2 * math.prod(box_of(spec).shape)])

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.layers(self.flat(observations)).chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD_RANGE)


class TwinCritics(nn.Module):
    """Two networks, each from observations and actions to a value."""

    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.flat = FlatObservation(spec.observation_space)
        inputs = self.flat.size + math.prod(box_of(spec).shape)
        self.twins = nn.ModuleList(perceptron([inputs, width, width, 1]) for _ in range(2))

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        inputs = torch.cat([self.flat(observations), actions], -1)
        return torch.stack([twin(inputs).squeeze(-1) for twin in self.twins])


class ActorAndCritics(nn.Module):
    """The network of SAC."""

    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.actor = GaussianActor(spec, width)
        self.critics = TwinCritics(spec, width)


class SACPolicy:
    """Draws actions in acting, uniform ones at first, and takes the mean in evaluation.

    Extras: the action between -1 and 1.
    """

    def __init__(self, network: Any, space: Any, random_steps: int, evaluation: bool) -> None:
        self._network, self._space, self._evaluation = network, space, evaluation
        self._random_steps = random_steps

    def __call__(
        self, observations: Any, state: Any, generator: np.random.Generator, counts: Mapping[str, int]
    ) -> tuple[Any, Any, Any]:
        with torch.no_grad():
            mean, log_std = self._network.actor(tensors(observations))
            if self._evaluation:
                return scaled_to(self._space, mean.tanh()), state, None
            if counts["env_steps"] < self._random_steps:
                actions = torch.as_tensor(generator.uniform(-1.0, 1.0, mean.shape).astype(np.float32))
            else:
                actions, _ = squashed(mean, log_std, generator)
        return scaled_to(self._space, actions), state, actions.numpy()


def squashed(mean: Tensor, log_std: Tensor, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return random actions between -1 and 1 with their log densities (Haarnoja et al. 2018, appendix C)."""
    noise = torch.as_tensor(generator.standard_normal(mean.shape, dtype=np.float32))
    raw = mean + log_std.exp() * noise
    normal = -(0.5 * noise.square() + log_std + 0.5 * math.log(2.0 * math.pi))
    # log(1 - tanh(x)²), written so that it does not become the log of 0 for large x
    slope = 2.0 * (math.log(2.0) - raw - nn.functional.softplus(-2.0 * raw))
    return raw.tanh(), (normal - slope).sum(-1)


class Temperature(nn.Module):
    """The weight of the entropy, as its log."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))


class SACLearner(TorchLearner):
    """Takes a step for the critics, one for the actor, and one for the weight of the entropy."""

    def __init__(self, network: Any, target_entropy: float, config: SACConfig, generator: np.random.Generator) -> None:
        self._config, self._target_entropy = config, target_entropy
        self._targets, self._temperature = copy.deepcopy(network.critics), Temperature()
        rate = config.learning_rate
        self._actor_optimizer = torch.optim.Adam(network.actor.parameters(), lr=rate)
        self._critic_optimizer = torch.optim.Adam(network.critics.parameters(), lr=rate)
        self._temperature_optimizer = torch.optim.Adam(self._temperature.parameters(), lr=rate)
        parts = {
            "targets": self._targets,
            "temperature": self._temperature,
            "actor_optimizer": self._actor_optimizer,
            "critic_optimizer": self._critic_optimizer,
            "temperature_optimizer": self._temperature_optimizer,
        }
        super().__init__(network, generator, parts)

    def step(self, sample: Sample) -> Update:
        data = tree_map(torch.as_tensor, sample.data)
        actor, critics, weight = self.network.actor, self.network.critics, self._temperature.log.detach().exp()
        with torch.no_grad():
            mean, log_std = actor(data.next_observation)
            following, logs = squashed(mean, log_std, self.generator)
            value = self._targets(data.next_observation, following).amin(0) - weight * logs
            target = data.reward + data.discount * value
        critic_loss = (critics(data.observation, data.extras) - target).square().mean(-1).sum()
        _minimize(critic_loss, self._critic_optimizer)

        mean, log_std = actor(data.observation)
        actions, logs = squashed(mean, log_std, self.generator)
        critics.requires_grad_(False)  # the actor's loss needs their gradient for the actions only
        actor_loss = (weight * logs - critics(data.observation, actions).amin(0)).mean()
        _minimize(actor_loss, self._actor_optimizer)
        critics.requires_grad_(True)

        surplus = (-logs.detach() - self._target_entropy).mean()
        _minimize(self._temperature.log.exp() * surplus, self._temperature_optimizer)
        with torch.no_grad():
            for target_value, new in zip(self._targets.parameters(), critics.parameters(), strict=True):
                target_value.lerp_(new, self._config.tau)
        self.steps += 1
        return Update(metrics={"loss": float(critic_loss.detach()), "entropy_weight": float(weight)})


def _minimize(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
