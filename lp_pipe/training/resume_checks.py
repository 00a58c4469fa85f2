"""DOC"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lp_pipe.errors import PipelineError
from lp_pipe.private_torch import schedulers_in

# torch's schedulers keep these among an optimizer's own.
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
WEIGHTS_ALONE = (
    "to begin anew with its weights, write them to a file by `lp_pipe checkpoint export`, and give what "
    "safetensors.torch.load_file reads to load_state_dict()"
)


def refuse_other_optimizer(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], saved: Mapping[str, Any], kind: str | None = None
) -> None:
    """saved: the options that the group's parameters have in the checkpoint. kind: the class of the optimizer there.

    By the name of the class: Adam's options and state are AdamW's, too. None: written before that was kept. Then by the
    options: another version of torch may have more or fewer; only another optimizer has some more and some fewer.

    Raises:
        PipelineError: names what differs, and says how to take the weights alone.
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
            f"the checkpoint is of another optimizer than {own}: its options have "
            f"{', '.join(unknown)}, and not {', '.join(lacking)}; {WEIGHTS_ALONE}"
        )


def kind_of(scheduler: Any) -> str:
    """Its class, and those of the schedulers that it consists of: "SequentialLR of LinearLR and ExponentialLR"."""
    inner = schedulers_in(scheduler)
    return type(scheduler).__name__ + (f" of {' and '.join(map(_inner_kind, inner))}" if inner else "")


def refuse_other_scheduler(scheduler: Any, saved: str | None) -> None:
    """saved: `kind_of` the checkpoint's; None: it has none, or was written before kinds were kept.

    By the names of classes alone: the states of some have the same entries (LambdaLR, MultiplicativeLR).

    Raises:
        PipelineError: names both, and says how to take the weights alone.
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
    """A parameter, the options of its group, and what tells that group from others."""

    name: str
    options: Mapping[str, Any]
    group: Any


def refuse_other_groups(own: Iterable[GroupMember], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """saved: by name, what the checkpoint has of a parameter; older ones do not have its "group".

    Groups whose options are the same may be cut in any way.

    Raises:
        PipelineError: groups were joined or divided; names two parameters and the option in which they differ.
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
    """Members of one group of `joined`, of which each has its place in `apart`, have different options there."""
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
    """Return whether two options of an optimizer are equal; True where that cannot be told."""
    if isinstance(one, Tensor) and isinstance(another, Tensor):
        return torch.equal(one, another)
    try:
        return bool(one == another)
    except Exception:  # a user's own, or an array: nobody can say
        return True


def refuse_other_dtypes(parameters: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """An optimizer's state has the dtype of its parameter; weights alone are converted by load_state_dict().

    Raises:
        PipelineError: names a parameter, both dtypes, and says how to take the weights alone.
    """
    for name, parameter in parameters.items():
        if name in saved and saved[name].dtype != parameter.dtype:  # a hook of state_dict may save other names
            raise PipelineError(
                f"the checkpoint is of a model of another dtype: {name} is {saved[name].dtype} there and "
                f"{parameter.dtype} here; {WEIGHTS_ALONE}"
            )
