"""What an optimizer keeps for its parameters, also one that wraps another, as Lookahead does.

Such a one may have a `state` that stays empty, and gives the inner one's in state_dict(): what a class says there
itself is what a checkpoint has, and goes back the same way.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class OfParameter(NamedTuple):
    """What was saved of one: its state, and the options of its group."""

    state: dict[str, Any]
    options: dict[str, Any]


def says_it_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its class has a state_dict or load_state_dict of its own."""
    kind, usual = type(optimizer), torch.optim.Optimizer
    return any(
        getattr(kind, name, getattr(usual, name)) is not getattr(usual, name)
        for name in ("state_dict", "load_state_dict")
    )


def state_of(optimizer: torch.optim.Optimizer) -> Mapping[Tensor, dict[str, Any]]:
    """By parameter; not copied."""
    if not says_it_itself(optimizer):
        return optimizer.state  # the other way takes as long as copying many small parameters
    packed = optimizer.state_dict()
    return {parameter: packed["state"].get(index, {}) for _, index, parameter in _places(optimizer, packed)}


def keys_beside(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Under which its state has something for all parameters together, such as a count of steps; torch saves these."""
    if not says_it_itself(optimizer):
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [key for key, values in optimizer.state.items() if values and id(key) not in own]
    packed = optimizer.state_dict()
    indices = {index for _, index, _ in _places(optimizer, packed)}
    return [key for key, values in packed["state"].items() if values and key not in indices]


def restore(optimizer: torch.optim.Optimizer, saved: Mapping[Tensor, OfParameter]) -> None:
    """Parameters that were not saved keep what they have."""
    if says_it_itself(optimizer):
        _load(optimizer, saved)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in saved:
                group.update(saved[parameter].options)
                optimizer.state[parameter] = saved[parameter].state


def _load(optimizer: torch.optim.Optimizer, saved: Mapping[Tensor, OfParameter]) -> None:
    packed = optimizer.state_dict()
    for group, index, parameter in _places(optimizer, packed):
        if parameter in saved:
            packed["state"][index] = saved[parameter].state
            group.update(saved[parameter].options)
    optimizer.load_state_dict(packed)


def _places(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Any, Tensor]]:
    """Each parameter with its group and its number in the state_dict."""
    for group, own in zip(packed["param_groups"], optimizer.param_groups, strict=True):
        for index, parameter in zip(group["params"], own["params"], strict=True):
            yield group, index, parameter
