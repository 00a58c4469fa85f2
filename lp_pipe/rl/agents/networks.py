"""What the agents of torch share: encoders, distributions of actions, and the state of a learner."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lp_pipe.rl.experiment import Spec
from lp_pipe.rl.tree import tree_map


def tensors(tree: Any) -> Any:
    """Return the tree with tensors for arrays."""
    return tree_map(torch.as_tensor, tree)


def time_first(tree: Any) -> Any:
    """Return the tree of tensors [T, B, …] for arrays [B, T, …], as a table gives them."""
    return tree_map(lambda leaf: torch.as_tensor(leaf).transpose(0, 1), tree)


def one_observation(spec: Spec) -> Any:
    """Return a batch of one observation of the space, to try a network with."""
    return tree_map(lambda leaf: torch.as_tensor(np.asarray(leaf))[None], spec.observation_space.sample())


def check_shape(name: str, found: Tensor, wanted: tuple[int, ...], space: Any) -> None:
    """Refuse what a network returned.

    Raises:
        ValueError: it has another shape.
    """
    if tuple(found.shape) != wanted:
        raise ValueError(
            f"the network returned {name} of shape {tuple(found.shape)} for one observation: it must be {wanted} "
            f"for {space}"
        )


def num_actions_of(spec: Spec) -> int:
    """Return the number of actions.

    Raises:
        ValueError: the actions are not a Discrete space that starts at 0.
    """
    space = spec.action_space
    if not hasattr(space, "n") or space.shape or getattr(space, "start", 0) != 0:
        raise ValueError(f"the agent needs a Discrete action space that starts at 0, got {space}")
    return int(space.n)


class FlatObservation(nn.Module):
    """Makes one vector of an observation that is one array; a Discrete observation becomes one-hot.

    size: of the vector. Axes before those of the space are kept.
    """

    def __init__(self, space: Any) -> None:
        """Raises:
        ValueError: the observation is a tree.
        """
        super().__init__()
        if getattr(space, "spaces", None) is not None or getattr(space, "shape", None) is None:
            raise ValueError(f"the agent's own network takes one array, not {space}: give a network_factory")
        self._axes = len(space.shape)
        self._num_values = int(space.n) if hasattr(space, "n") and not space.shape else 0
        self._start = int(getattr(space, "start", 0)) if self._num_values else 0
        self.size = self._num_values or math.prod(space.shape)

    def forward(self, observations: Tensor) -> Tensor:
        if self._num_values:
            return nn.functional.one_hot(observations.long() - self._start, self._num_values).float()
        return observations.reshape(*observations.shape[: observations.ndim - self._axes], self.size).float()


def perceptron(sizes: Sequence[int], activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers of these sizes, the first of which is the input's, with an activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


class DiscreteActions:
    """A softmax over a Discrete space; its parameters are logits [..., A]."""

    def __init__(self, spec: Spec) -> None:
        self.num_parameters = num_actions_of(spec)

    def sample(self, logits: Tensor, generator: np.random.Generator) -> Tensor:
        """Return random actions, by Gumbel noise."""
        return (logits + torch.as_tensor(generator.gumbel(size=logits.shape))).argmax(-1)

    def best(self, logits: Tensor) -> Tensor:
        """Return the likeliest actions."""
        return logits.argmax(-1)

    def log_probabilities(self, logits: Tensor, actions: Tensor) -> Tensor:
        """Return the logarithms of the actions' probabilities."""
        return logits.log_softmax(-1).gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self, logits: Tensor) -> Tensor:
        """Return the entropy of each distribution."""
        logs = logits.log_softmax(-1)
        return -(logs.exp() * logs).sum(-1)

    def for_environment(self, actions: Tensor) -> Any:
        """Return the actions as the environment takes them."""
        return actions.numpy()


class GaussianActions:
    """Independent normal distributions over a Box; their parameters are (mean, log_std), each [..., A].

    A bounded Box is scaled to -1 … 1, and actions beyond that are clipped.
    """

    def __init__(self, spec: Spec) -> None:
        self.space = box_of(spec)
        self.num_parameters = math.prod(self.space.shape)

    def sample(self, parameters: tuple[Tensor, Tensor], generator: np.random.Generator) -> Tensor:
        """Return random actions."""
        mean, log_std = parameters
        return mean + log_std.exp() * torch.as_tensor(generator.standard_normal(mean.shape, dtype=np.float32))

    def best(self, parameters: tuple[Tensor, Tensor]) -> Tensor:
        """Return the likeliest actions."""
        return parameters[0]

    def log_probabilities(self, parameters: tuple[Tensor, Tensor], actions: Tensor) -> Tensor:
        """Return the logarithms of the actions' densities."""
        mean, log_std = parameters
        squares = ((actions - mean) / log_std.exp()).square()
        return -(0.5 * squares + log_std + 0.5 * math.log(2.0 * math.pi)).sum(-1)

    def entropy(self, parameters: tuple[Tensor, Tensor]) -> Tensor:
        """Return the entropy of each distribution."""
        return (parameters[1] + 0.5 * math.log(2.0 * math.pi * math.e)).sum(-1)

    def for_environment(self, actions: Tensor) -> Any:
        """Return the actions as the environment takes them."""
        return scaled_to(self.space, actions)


def actions_of(spec: Spec) -> DiscreteActions | GaussianActions:
    """Return the distribution for an action space.

    Raises:
        ValueError: it is neither a Discrete space nor a Box of floating point numbers.
    """
    return DiscreteActions(spec) if hasattr(spec.action_space, "n") else GaussianActions(spec)


def box_of(spec: Spec) -> Any:
    """Return the action space.

    Raises:
        ValueError: it is not a Box of floating point numbers.
    """
    space = spec.action_space
    if not hasattr(space, "low") or space.dtype.kind != "f":
        raise ValueError(f"the agent needs a Discrete action space or a Box of floating point numbers, got {space}")
    return space


def scaled_to(space: Any, actions: Tensor) -> Any:
    """Return actions [B, A] from -1 to 1 in the bounds of a Box; where it has none, as they are."""
    values = actions.numpy().reshape(len(actions), *space.shape)
    is_bounded = np.isfinite(space.low) & np.isfinite(space.high)
    low, high = np.where(is_bounded, space.low, -1.0), np.where(is_bounded, space.high, 1.0)
    scaled = low + (np.where(is_bounded, values.clip(-1.0, 1.0), values) + 1.0) * 0.5 * (high - low)
    return scaled.clip(space.low, space.high).astype(space.dtype)


class TorchLearner:
    """A learner whose state is that of its parts, its steps and its generator. Its weights are those of a network.

    parts: by name, everything with a state that later steps depend on.
    """

    def __init__(self, network: Any, generator: np.random.Generator, parts: Mapping[str, Any]) -> None:
        self.network, self.generator, self.steps = network, generator, 0
        self._parts = {"network": network, **parts}

    def variables(self) -> Any:
        return self.network.state_dict()

    def state_dict(self) -> dict[str, Any]:
        states = {name: part.state_dict() for name, part in self._parts.items()}
        return {**states, "steps": self.steps, "generator": self.generator.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self.steps = state["steps"]
        self.generator.bit_generator.state = state["generator"]
