"""PPO: a policy gradient with a clipped objective, several passes over the data of each update.

Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (2017); Schulman et al., "High-Dimensional
Continuous Control Using Generalized Advantage Estimation" (2016).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lp_pipe.rl.adders import RolloutAdder
from lp_pipe.rl.agents.networks import (
    DiscreteActions,
    FlatObservation,
    GaussianActions,
    TorchLearner,
    actions_of,
    check_shape,
    one_observation,
    perceptron,
    tensors,
    time_first,
)
from lp_pipe.rl.experiment import Spec, Update
from lp_pipe.rl.losses import gae
from lp_pipe.rl.replay.table import Sample, Table
from lp_pipe.rl.tree import tree_map


@dataclass(frozen=True)
class PPOConfig:
    """The options of PPO.

    rollout_length: steps of one item; an episode's end fills it up. batch_size: rollouts of one update, which makes
    `epochs` passes over their steps in minibatches of `minibatch_size` steps. max_queue_size: rollouts that wait for an
    update; None: 64 updates.
    """

    rollout_length: int = 32
    batch_size: int = 16
    minibatch_size: int = 64
    epochs: int = 10
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    learning_rate: float = 1e-3
    value_weight: float = 0.5
    entropy_weight: float = 0.0
    max_gradient_norm: float = 0.5
    max_queue_size: int | None = None

    def __post_init__(self) -> None:
        """Raises:
        ValueError: a number is out of range.
        """
        if min(self.rollout_length, self.batch_size, self.minibatch_size, self.epochs) < 1:
            raise ValueError(
                "PPOConfig: rollout_length, batch_size, minibatch_size and epochs must be at least 1, got "
                f"{self.rollout_length}, {self.batch_size}, {self.minibatch_size} and {self.epochs}"
            )
        if self.max_queue_size is not None and self.max_queue_size < self.batch_size:
            raise ValueError(
                f"PPOConfig: max_queue_size={self.max_queue_size} must be at least batch_size={self.batch_size}"
            )


class PPOBuilder:
    """Makes the parts of PPO. Network: from observations [B, …] to (logits or (mean, log_std), value [B])."""

    def __init__(self, config: PPOConfig | None = None) -> None:
        self.config = config or PPOConfig()
        self.batch_size = self.config.batch_size
        self.discount = self.config.discount

    def make_network(self, spec: Spec) -> nn.Module:
        """Return networks of two hidden layers for an observation that is one array.

        Raises:
            ValueError: the observation is a tree, or the actions are neither a Discrete space nor a Box.
        """
        return ActorCritic(spec)

    def make_replay_table(self, spec: Spec) -> Table:
        return Table.queue(self.config.max_queue_size or 64 * self.config.batch_size)

    def make_adder(self, spec: Spec) -> RolloutAdder:
        return RolloutAdder(self.config.rollout_length, self.config.discount)

    def make_policy(self, network: nn.Module, spec: Spec, evaluation: bool) -> "PPOPolicy":
        return PPOPolicy(network, actions_of(spec), evaluation)

    def make_learner(self, network: nn.Module, spec: Spec, generator: np.random.Generator) -> "PPOLearner":
        """Return a learner.

        Raises:
            ValueError: the network does not return the parameters of the actions and one value.
        """
        actions = actions_of(spec)
        with torch.no_grad():
            parameters, value = network(one_observation(spec))
        for one in parameters if isinstance(parameters, tuple) else [parameters]:
            check_shape("parameters of actions", one, (1, actions.num_parameters), spec.action_space)
        check_shape("the value", value, (1,), spec.observation_space)
        return PPOLearner(network, actions, self.config, generator)


class ActorCritic(nn.Module):
    """A policy and a value function with two hidden layers each."""

    def __init__(self, spec: Spec, width: int = 64) -> None:
        super().__init__()
        actions = actions_of(spec)
        self.flat = FlatObservation(spec.observation_space)
        self.policy = perceptron([self.flat.size, width, width, actions.num_parameters], nn.Tanh)
        self.value = perceptron([self.flat.size, width, width, 1], nn.Tanh)
        is_gaussian = isinstance(actions, GaussianActions)
        self.log_std = nn.Parameter(torch.zeros(actions.num_parameters)) if is_gaussian else None
        for layers, gain in ((self.policy, 0.01), (self.value, 1.0)):
            linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
            for layer in linear:
                nn.init.orthogonal_(layer.weight, gain if layer is linear[-1] else 2.0**0.5)
                nn.init.zeros_(layer.bias)

    def forward(self, observations: Tensor) -> tuple[Any, Tensor]:
        flat = self.flat(observations)
        parameters, value = self.policy(flat), self.value(flat).squeeze(-1)
        return (parameters if self.log_std is None else (parameters, self.log_std.expand_as(parameters))), value


class PPOPolicy:
    """Draws actions in acting, and takes the likeliest in evaluation. Extras: the action drawn, its log probability."""

    def __init__(self, network: nn.Module, actions: DiscreteActions | GaussianActions, evaluation: bool) -> None:
        self._network, self._actions, self._evaluation = network, actions, evaluation

    def __call__(
        self, observations: Any, state: Any, generator: np.random.Generator, counts: Mapping[str, int]
    ) -> tuple[Any, Any, Any]:
        with torch.no_grad():
            parameters, _ = self._network(tensors(observations))
            if self._evaluation:
                return self._actions.for_environment(self._actions.best(parameters)), state, None
            drawn = self._actions.sample(parameters, generator)
            logs = self._actions.log_probabilities(parameters, drawn)
        return self._actions.for_environment(drawn), state, {"drawn": drawn.numpy(), "log_probability": logs.numpy()}


class PPOLearner(TorchLearner):
    """Learns from a batch of rollouts; steps that are padding do not count."""

    def __init__(
        self,
        network: nn.Module,
        actions: DiscreteActions | GaussianActions,
        config: PPOConfig,
        generator: np.random.Generator,
    ) -> None:
        self._actions, self._config = actions, config
        self._optimizer = torch.optim.Adam(network.parameters(), lr=config.learning_rate, eps=1e-5)
        super().__init__(network, generator, {"optimizer": self._optimizer})

    def step(self, sample: Sample) -> Update:
        config, data = self._config, time_first(sample.data)
        length, width = data.reward.shape
        with torch.no_grad():
            every = tree_map(lambda leaf: leaf.flatten(0, 1), data.observation)
            values = self.network(every)[1].reshape(length + 1, width)
        ends = torch.cat([1.0 - data.mask[1:], torch.ones(1, width)])
        advantages = gae(data.reward, data.discount, values[:-1], values[1:], ends, config.gae_lambda)
        is_real = data.mask.flatten() > 0
        now = tree_map(lambda leaf: leaf[:-1].flatten(0, 1)[is_real], data.observation)
        drawn, before = (data.extras[name].flatten(0, 1)[is_real] for name in ("drawn", "log_probability"))
        advantages, returns = (one.flatten()[is_real] for one in (advantages, advantages + values[:-1]))
        losses = []
        for _ in range(config.epochs):
            order = torch.as_tensor(self.generator.permutation(len(returns)))
            for chosen in order.split(config.minibatch_size):
                batch = tree_map(lambda leaf, chosen=chosen: leaf[chosen], now)
                losses.append(self._minibatch(batch, *(one[chosen] for one in (drawn, before, advantages, returns))))
        self.steps += 1
        return Update(metrics={"loss": sum(losses) / len(losses)})

    def _minibatch(
        self, observations: Any, drawn: Tensor, before: Tensor, advantages: Tensor, returns: Tensor
    ) -> float:
        """Take one step of the optimizer; return the loss (Schulman et al. 2017, equations 7 and 9)."""
        config = self._config
        parameters, values = self.network(observations)
        ratio = (self._actions.log_probabilities(parameters, drawn) - before).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
        gain = torch.minimum(ratio * advantages, ratio.clamp(1.0 - config.clip, 1.0 + config.clip) * advantages).mean()
        entropy = self._actions.entropy(parameters).mean()
        error = (values - returns).square().mean()
        loss = -gain + config.value_weight * error - config.entropy_weight * entropy
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), config.max_gradient_norm)
        self._optimizer.step()
        return float(loss.detach())
