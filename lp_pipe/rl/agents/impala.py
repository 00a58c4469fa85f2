"""IMPALA: an actor-critic for actors whose weights are behind the learner's, with or without a recurrent network.

Source: Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures"
(2018).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lp_pipe.rl.adders import SequenceAdder
from lp_pipe.rl.agents.networks import (
    DiscreteActions,
    FlatObservation,
    TorchLearner,
    check_shape,
    num_actions_of,
    one_observation,
    perceptron,
    tensors,
    time_first,
)
from lp_pipe.rl.experiment import Spec, Update
from lp_pipe.rl.losses import vtrace
from lp_pipe.rl.replay.rate_limiter import SampleToInsertRatio
from lp_pipe.rl.replay.selectors import Uniform
from lp_pipe.rl.replay.table import Sample, Table
from lp_pipe.rl.tree import tree_map


@dataclass(frozen=True)
class IMPALAConfig:
    """The options of IMPALA.

    lstm: units of a recurrent layer, or None. sequence_length: steps of one item; an episode's end fills it up.
    batch_size: sequences. samples_per_insert: 1: each sequence is used once, in order; more: sequences are drawn from
    the newest max_queue_size ones (section 5.2.2 of the paper).
    """

    lstm: int | None = None
    sequence_length: int = 20
    batch_size: int = 16
    samples_per_insert: float = 1.0
    max_queue_size: int = 1_000
    discount: float = 0.99
    learning_rate: float = 1e-3
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    max_gradient_norm: float = 40.0
    clip_rho: float = 1.0
    clip_c: float = 1.0

    def __post_init__(self) -> None:
        """Raises:
        ValueError: a number is out of range.
        """
        if min(self.sequence_length, self.batch_size, 1 if self.lstm is None else self.lstm) < 1:
            raise ValueError(
                "IMPALAConfig: sequence_length, batch_size and lstm must be at least 1, got "
                f"{self.sequence_length}, {self.batch_size} and {self.lstm}"
            )
        if self.samples_per_insert < 1.0 or self.max_queue_size < self.batch_size:
            raise ValueError(
                "IMPALAConfig: samples_per_insert must be at least 1 and max_queue_size at least batch_size, got "
                f"{self.samples_per_insert}, {self.max_queue_size} and {self.batch_size}"
            )


class IMPALABuilder:
    """Makes the parts of IMPALA. Network: (observations [T, B, …], state) to (logits, value [T, B], next state).

    A network with a state has `initial_state(n)`, a tree of tensors with a leading axis of n.
    """

    def __init__(self, config: IMPALAConfig | None = None) -> None:
        self.config = config or IMPALAConfig()
        self.batch_size = self.config.batch_size
        self.discount = self.config.discount

    def make_network(self, spec: Spec) -> nn.Module:
        """Return a network of two layers, the second of which may be recurrent, for an observation that is one array.

        Raises:
            ValueError: the observation is a tree, or the actions are not a Discrete space.
        """
        if self.config.lstm is None:
            return FeedForwardNetwork(spec)
        return RecurrentNetwork(spec, self.config.lstm)

    def make_replay_table(self, spec: Spec) -> Table:
        config = self.config
        if config.samples_per_insert == 1.0:
            return Table.queue(config.max_queue_size)
        error_buffer = max(100.0 * config.samples_per_insert, float(config.batch_size))
        limiter = SampleToInsertRatio(config.samples_per_insert, config.batch_size, error_buffer)
        return Table(config.max_queue_size, Uniform(), rate_limiter=limiter)

    def make_adder(self, spec: Spec) -> SequenceAdder:
        length = self.config.sequence_length
        return SequenceAdder(length, length, "zero_pad", self.config.discount)

    def make_policy(self, network: nn.Module, spec: Spec, evaluation: bool) -> "IMPALAPolicy":
        return IMPALAPolicy(network, DiscreteActions(spec), evaluation)

    def make_learner(self, network: nn.Module, spec: Spec, generator: np.random.Generator) -> "IMPALALearner":
        """Return a learner.

        Raises:
            ValueError: the network does not return the logits of the actions and one value.
        """
        with torch.no_grad():
            observation = tree_map(lambda leaf: leaf[None], one_observation(spec))
            logits, value, _ = network(observation, initial_state_of(network, 1))
        check_shape("logits", logits, (1, 1, num_actions_of(spec)), spec.action_space)
        check_shape("the value", value, (1, 1), spec.observation_space)
        return IMPALALearner(network, DiscreteActions(spec), self.config, generator)


class FeedForwardNetwork(nn.Module):
    """Two hidden layers, shared by policy and value. The state is None."""

    def __init__(self, spec: Spec, width: int = 64) -> None:
        super().__init__()
        self.flat = FlatObservation(spec.observation_space)
        self.body = perceptron([self.flat.size, width, width])
        self.policy, self.value = nn.Linear(width, num_actions_of(spec)), nn.Linear(width, 1)

    def forward(self, observations: Tensor, state: None) -> tuple[Tensor, Tensor, None]:
        hidden = self.body(self.flat(observations)).relu()
        return self.policy(hidden), self.value(hidden).squeeze(-1), None


class RecurrentNetwork(nn.Module):
    """A hidden layer and an LSTM, shared by policy and value. The state is (hidden, cell), each [B, units]."""

    def __init__(self, spec: Spec, units: int, width: int = 64) -> None:
        super().__init__()
        self.flat = FlatObservation(spec.observation_space)
        self.body = nn.Linear(self.flat.size, width)
        self.memory = nn.LSTM(width, units)
        self.policy, self.value = nn.Linear(units, num_actions_of(spec)), nn.Linear(units, 1)

    def initial_state(self, n: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(n, self.memory.hidden_size), torch.zeros(n, self.memory.hidden_size)

    def forward(
        self, observations: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        hidden, cell = state
        outputs, (hidden, cell) = self.memory(self.body(self.flat(observations)).relu(), (hidden[None], cell[None]))
        return self.policy(outputs), self.value(outputs).squeeze(-1), (hidden[0], cell[0])


def initial_state_of(network: nn.Module, n: int) -> Any:
    """Return the state of a network at the start of n episodes, or None."""
    initial_state = getattr(network, "initial_state", None)
    return None if initial_state is None else initial_state(n)


class IMPALAPolicy:
    """Draws actions in acting, and takes the likeliest in evaluation. Extras: the log probability of the action."""

    def __init__(self, network: nn.Module, actions: DiscreteActions, evaluation: bool) -> None:
        self._network, self._actions, self._evaluation = network, actions, evaluation

    def initial_state(self, n: int) -> Any:
        return tree_map(lambda leaf: leaf.numpy(), initial_state_of(self._network, n))

    def __call__(
        self, observations: Any, state: Any, generator: np.random.Generator, counts: Mapping[str, int]
    ) -> tuple[Any, Any, Any]:
        with torch.no_grad():
            one_step = tree_map(lambda leaf: leaf[None], tensors(observations))
            logits, _, state = self._network(one_step, tensors(state))
            state = tree_map(lambda leaf: leaf.numpy(), state)
            if self._evaluation:
                return self._actions.best(logits[0]).numpy(), state, None
            drawn = self._actions.sample(logits[0], generator)
            return drawn.numpy(), state, self._actions.log_probabilities(logits[0], drawn).numpy()


class IMPALALearner(TorchLearner):
    """Learns from a batch of sequences, each from the state that its actor had; steps that are padding do not count."""

    def __init__(
        self, network: nn.Module, actions: DiscreteActions, config: IMPALAConfig, generator: np.random.Generator
    ) -> None:
        self._actions, self._config = actions, config
        self._optimizer = torch.optim.Adam(network.parameters(), lr=config.learning_rate)
        super().__init__(network, generator, {"optimizer": self._optimizer})

    def step(self, sample: Sample) -> Update:
        config, data = self._config, time_first(sample.data._replace(state=None))
        logits, values, _ = self.network(data.observation, tensors(sample.data.state))
        logs = self._actions.log_probabilities(logits[:-1], data.action)
        is_padding = data.mask == 0
        # Padding has no weight, so that nothing of it reaches the steps before: their last value is that of the
        # observation at which the episode ended.
        log_rhos = (logs - data.extras).detach().masked_fill(is_padding, -torch.inf)
        targets = vtrace(log_rhos, data.discount, data.reward, values[:-1], values[-1], config.clip_rho, config.clip_c)
        count = data.mask.sum()
        gain = (data.mask * targets.advantages * logs).sum() / count
        error = (data.mask * (targets.vs - values[:-1]).square()).sum() / count
        entropy = (data.mask * self._actions.entropy(logits[:-1])).sum() / count
        loss = -gain + config.value_weight * error - config.entropy_weight * entropy
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), config.max_gradient_norm)
        self._optimizer.step()
        self.steps += 1
        return Update(metrics={"loss": float(loss.detach())})
