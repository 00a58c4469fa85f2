"""Compare a checkpoint with the optimizer, the scheduler and the parameters that are to continue from it.

A checkpoint keeps a group's options with each of its parameters, so that any cut of the model finds them. If the groups
were others, options would be applied to the wrong parameters.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lp_pipe.errors import PipelineError
from lp_pipe.private_torch import schedulers_in

# torch's schedulers store these options in the optimizer's groups.
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
WEIGHTS_ALONE = (
    "to start again with its weights alone, write them to a file with `lp_pipe checkpoint export`, and pass what "
    "safetensors.torch.load_file reads to load_state_dict()"
)


def refuse_other_optimizer(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], saved: Mapping[str, Any], kind: str | None = None
) -> None:
    """Refuse to continue with an optimizer of another class than the checkpoint's.

    Classes are compared by name, since Adam's options and state are also AdamW's. If the checkpoint does not name the
    class (`kind` is None, older versions), options are compared: another version of torch may have more or fewer of
    them, and only another optimizer has both more and fewer.

    group: a parameter group of the optimizer.
    saved: the options of the group's parameters in the checkpoint.

    Raises:
        PipelineError: the error names the difference, and says how to take the weights alone.
    """
    own = type(optimizer).__name__
    if kind is not None and kind != own:
        raise PipelineError(
            f"the checkpoint is of another optimizer, {kind}, than this model's, {own}: give the model that one; "
            f"{WEIGHTS_ALONE}"
        )
    lacking = sorted({*getattr(optimizer, "defaults", ())} - {*saved})
    unknown = sorted({*saved} - {*group} - _OF_SCHEDULERS)
    if saved and lacking and unknown:
        raise PipelineError(
            f"the checkpoint is of another optimizer than {own}: its options have {', '.join(unknown)}, and not "
            f"{', '.join(lacking)}; {WEIGHTS_ALONE}"
        )


def kind_of(scheduler: Any) -> str:
    """Return the scheduler's class and those of the schedulers in it: "SequentialLR of LinearLR and ExponentialLR"."""
    inner = schedulers_in(scheduler)
    return type(scheduler).__name__ + (f" of {' and '.join(map(_inner_kind, inner))}" if inner else "")


def refuse_other_scheduler(scheduler: Any, saved: str | None) -> None:
    """Refuse to continue with a scheduler of another class than the checkpoint's.

    Only class names are compared: some states have the same entries (LambdaLR, MultiplicativeLR).

    saved: `kind_of` the checkpoint's scheduler; None if it has none or if an older version wrote the checkpoint.

    Raises:
        PipelineError: the error names both, and says how to take the weights alone.
    """
    own = kind_of(scheduler)
    if saved is not None and saved != own:
        raise PipelineError(
            f"the checkpoint is of another lr_scheduler, {saved}, than this model's, {own}: give the model that one; "
            f"{WEIGHTS_ALONE}"
        )


def _inner_kind(scheduler: Any) -> str:
    kind = kind_of(scheduler)
    return f"({kind})" if " " in kind else kind


class GroupMember(NamedTuple):
    """A parameter, the options of its group, and a value that differs between groups."""

    name: str
    options: Mapping[str, Any]
    group: Any


def refuse_other_groups(own: Iterable[GroupMember], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to continue if parameter groups were joined or divided; groups with equal options may be.

    saved: by parameter name, the entries of the checkpoint; those of older versions have no "group".

    Raises:
        PipelineError: the error names two parameters and the option in which they differ.
    """
    pairs = [
        (member, GroupMember(member.name, saved[member.name]["options"], saved[member.name]["group"][1]))
        for member in own
        if "group" in saved.get(member.name, ())
    ]
    now, before = [one for one, _ in pairs], [other for _, other in pairs]
    _refuse_joined(now, before, "in different parameter groups", "in one")
    _refuse_joined(before, now, "in one parameter group", "in different ones")


def _refuse_joined(joined: Sequence[GroupMember], apart: Sequence[GroupMember], there: str, here: str) -> None:
    """Refuse groups of `joined` with members that have different options in `apart`; both list the same parameters."""
    groups: dict[Any, list[GroupMember]] = {}
    for one, other in zip(joined, apart, strict=True):
        groups.setdefault(one.group, []).append(other)
    for members in groups.values():
        first, *others = {member.group: member for member in members}.values()
        for other in others:
            _refuse_unequal(first, other, there, here)


def _refuse_unequal(first: GroupMember, other: GroupMember, there: str, here: str) -> None:
    for key in sorted({*first.options} & {*other.options}):
        if not is_same(first.options[key], other.options[key]):
            raise PipelineError(
                f"the checkpoint's optimizer has {first.name} and {other.name} {there}, and this model's has them "
                f"{here} (where {key} is {first.options[key]} and {other.options[key]}): give the model the groups "
                f"that were saved; {WEIGHTS_ALONE}"
            )


def is_same(one: Any, another: Any) -> bool:
    """Return whether two options of an optimizer are equal; True if they cannot be compared."""
    if isinstance(one, Tensor) and isinstance(another, Tensor):
        return torch.equal(one, another)
    try:
        return bool(one == another)
    except Exception:  # a user's class, or an array, may not be comparable
        return True


def refuse_other_dtypes(parameters: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Refuse to continue if a parameter had another dtype: the optimizer's state has the dtype of its parameter.

    load_state_dict() converts weights, so it is the way to load the weights alone.

    Raises:
        PipelineError: the error names a parameter and both dtypes, and says how to take the weights alone.
    """
    for name, parameter in parameters.items():
        if name in saved and saved[name].dtype != parameter.dtype:  # a hook of state_dict may save under other names
            raise PipelineError(
                f"the checkpoint is of a model of another dtype: {name} is {saved[name].dtype} there and "
                f"{parameter.dtype} here; {WEIGHTS_ALONE}"
            )
