"""Read and restore what an optimizer and an LR scheduler keep, by parameter.

An optimizer that wraps another one, such as Lookahead, may have an empty `state` and return the inner one's state from
its own state_dict(). For a class that overrides state_dict() or load_state_dict(), a checkpoint therefore contains what
these methods return and take.

A scheduler's state has lists with one entry for each parameter group. Stages differ in their groups (one per layer, for
a learning rate that decays with depth), and so do other cuts of the same model. So each entry of such a list is saved
with the parameters of its group.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lp_pipe.errors import PipelineError


class OfParameter(NamedTuple):
    """The saved state of one parameter, and the options of its group."""

    state: dict[str, Any]
    options: dict[str, Any]


def overrides_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's class overrides state_dict() or load_state_dict()."""
    kind, usual = type(optimizer), torch.optim.Optimizer
    return any(
        getattr(kind, name, getattr(usual, name)) is not getattr(usual, name)
        for name in ("state_dict", "load_state_dict")
    )


def state_of(optimizer: torch.optim.Optimizer) -> Mapping[Tensor, dict[str, Any]]:
    """Return the optimizer's state by parameter, without copying it."""
    if not overrides_state_dict(optimizer):
        return optimizer.state  # packing it would take as long as copying many small parameters
    packed = optimizer.state_dict()
    return {parameter: packed["state"].get(index, {}) for _, index, parameter in _places(optimizer, packed)}


def keys_of_no_parameter(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the keys of state that belongs to no single parameter, such as a count of steps.

    torch's state_dict() contains these entries too.
    """
    if not overrides_state_dict(optimizer):
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [key for key, values in optimizer.state.items() if values and id(key) not in own]
    packed = optimizer.state_dict()
    indices = {index for _, index, _ in _places(optimizer, packed)}
    return [key for key, values in packed["state"].items() if values and key not in indices]


def restore(optimizer: torch.optim.Optimizer, saved: Mapping[Tensor, OfParameter]) -> None:
    """Give the optimizer the saved state and options; parameters that are not in `saved` keep theirs."""
    if overrides_state_dict(optimizer):
        _load(optimizer, saved)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in saved:
                group.update(saved[parameter].options)
                optimizer.state[parameter] = saved[parameter].state


def is_read_by_kernels(group: Mapping[str, Any]) -> bool:
    """Return whether kernels of the parameters' device read all state of the group; else `step` stays on the host.

    Source: torch.optim.Optimizer.load_state_dict.
    """
    return bool(group.get("fused") or group.get("capturable"))


def on_device_of(parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return state that was read on the host, moved to the parameter's device."""
    stays = set() if is_read_by_kernels(group) else {"step"}
    return {
        key: _as(parameter, value) if isinstance(value, Tensor) and key not in stays else value
        for key, value in state.items()
    }


def _as(parameter: Tensor, value: Tensor) -> Tensor:
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value.to(parameter.device)
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)  # a checkpoint keeps no strides


def _load(optimizer: torch.optim.Optimizer, saved: Mapping[Tensor, OfParameter]) -> None:
    packed = optimizer.state_dict()
    for group, index, parameter in _places(optimizer, packed):
        if parameter in saved:
            packed["state"][index] = saved[parameter].state
            group.update(saved[parameter].options)
    optimizer.load_state_dict(packed)


def _places(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Any, Tensor]]:
    """Yield each parameter with its group and its number in the state_dict."""
    for group, own in zip(packed["param_groups"], optimizer.param_groups, strict=True):
        for index, parameter in zip(group["params"], own["params"], strict=True):
            yield group, index, parameter


_ONE_STATE = (
    "make it a torch.optim.Optimizer that shares its groups and its state with the optimizers that it wraps "
    "(docs/pipeline.md, Optimizers)"
)


def refuse_hidden_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer with state that a checkpoint would lose.

    Only what belongs to a parameter reaches the stages of another cut: entries that a class adds to its state_dict(),
    or keeps in inner optimizers, do not.

    Raises:
        PipelineError: the optimizer has such state; the error says where to keep it instead.
    """
    kind = type(optimizer).__name__
    if overrides_state_dict(optimizer):
        packed: Any = optimizer.state_dict()
        if not isinstance(packed, Mapping) or not {"state", "param_groups"} <= packed.keys():
            raise PipelineError(
                f"{kind}.state_dict() is no dict of 'state' and 'param_groups', as torch's is, so a checkpoint could "
                f"not tell what belongs to which parameter: {_ONE_STATE}"
            )
        hidden = sorted({*packed} - {"state", "param_groups"})
        if hidden:
            raise PipelineError(
                f"{kind}.state_dict() has {', '.join(map(repr, hidden))}, which a checkpoint of a pipeline would "
                "lose: it keeps only what belongs to a parameter, so that any number of stages can load it. Put this "
                "into self.state[parameter] or into the options of the groups"
            )
    elif not hasattr(optimizer, "state"):
        raise PipelineError(
            f"{kind} has neither a state_dict() nor a state, so a checkpoint could not save it: {_ONE_STATE}"
        )
    if beside := sorted(map(str, keys_of_no_parameter(optimizer))):
        raise PipelineError(
            f"{kind}.state has {', '.join(map(repr, beside))}, which is no parameter of its groups and which a "
            "checkpoint of a pipeline would lose: it keeps only what belongs to a parameter, so that any number of "
            "stages can load it. Put this into self.state[parameter] or into the options of the groups"
        )
    own = state_of(optimizer)
    _refuse_shared_state(kind, own.values())
    for inner in _inner_optimizers(optimizer):
        if any(values.keys() - own.get(parameter, {}).keys() for parameter, values in inner.state.items()):
            raise PipelineError(
                f"{kind} wraps other optimizers, {type(inner).__name__} among them, whose state is not in its own, so "
                f"a checkpoint would lose it: {_ONE_STATE}"
            )


def _refuse_shared_state(kind: str, states: Iterable[Mapping[Any, Any]]) -> None:
    seen: set[int] = set()
    for values in states:
        tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
        shared = [key for key, value in tensors.items() if id(value) in seen]
        if shared:
            raise PipelineError(
                f"{kind} keeps one tensor as {shared[0]!r} of several parameters, and each of them would have a "
                "tensor of its own after a checkpoint: give each parameter its own, or put it into the options of the "
                "groups"
            )
        seen |= {id(value) for value in tensors.values()}


def _inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    found: list[Any] = []
    for value in vars(optimizer).values():
        if isinstance(value, (list, tuple)):
            found.extend(value)
        elif isinstance(value, Mapping):
            found.extend(value.values())
        else:
            found.append(value)
    return [inner for inner in found if isinstance(inner, torch.optim.Optimizer)]


# the ends of torch's names; also of names that users choose: peak_lrs, warmup_lrs
_NAMES = ("lrs", "_last_lr", "lr_lambdas", "momentums")
Path = tuple[str | int, ...]


def values_of_group(state: Mapping[str, Any], groups: int, group: int) -> dict[Path, Any]:
    """Return what a scheduler's state says of one group: {path of the list: entry}."""
    return {path: found[group] for path, found in _lists(state, ()) if len(found) == groups}


def with_group_values(
    saved: Mapping[str, Any], own: Mapping[str, Any], values: Sequence[Mapping[Path, Any] | None]
) -> dict[str, Any]:
    """Return the saved state with the lists that a scheduler with the state `own` needs.

    values: what was saved for each of its groups; None for a group without parameters. Entries that were not saved keep
        the value in `own`.
    """
    state = copy.deepcopy(dict(saved))
    for path, found in _lists(own, ()):
        if len(found) == len(values):
            fresh = [given.get(path, now) if given else now for given, now in zip(values, found, strict=True)]
            _put(state, path, fresh)
    return state


def _lists(state: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, list[Any]]]:
    for key, value in state.items():
        if str(key).endswith(_NAMES) and isinstance(value, list):
            yield (*path, key), value
        elif isinstance(value, Mapping):
            yield from _lists(value, (*path, key))
        elif isinstance(value, (list, tuple)):  # the schedulers in a SequentialLR
            for index, part in enumerate(value):
                if isinstance(part, Mapping):
                    yield from _lists(part, (*path, key, index))


def _put(state: Any, path: Path, value: list[Any]) -> None:
    *way, last = path
    try:
        for step in way:
            state = state[step]
    except (KeyError, IndexError, TypeError):
        return  # another kind of scheduler: its load_state_dict decides
    state[last] = value
