"""Whether an optimizer has its parameters in the groups that they were saved in.

A checkpoint keeps the options of a group with each of its parameters, so that any cut finds them; other groups would
take one parameter's for another's.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.saving.same_optimizer import WEIGHTS_ALONE


class Member(NamedTuple):
    """A parameter, the options of its group, and what tells that group from others."""

    name: str
    options: Mapping[str, Any]
    group: Any


def refuse_other_groups(own: Iterable[Member], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """saved: by name, what the checkpoint has of a parameter; older ones do not have its "group".

    Groups whose options are the same may be cut in any way.

    Raises:
        PipelineError: groups were joined or divided; names two parameters and the option in which they differ.
    """
    pairs = [
        (member, Member(member.name, saved[member.name]["options"], saved[member.name]["group"][1]))
        for member in own
        if "group" in saved.get(member.name, ())
    ]
    now, before = [one for one, _ in pairs], [other for _, other in pairs]
    _refuse_joined(now, before, "in different parameter groups", "in one")
    _refuse_joined(before, now, "in one parameter group", "in different ones")


def _refuse_joined(joined: Sequence[Member], apart: Sequence[Member], there: str, here: str) -> None:
    """Members of one group of `joined`, of which each has its place in `apart`, have different options there."""
    groups: dict[Any, list[Member]] = {}
    for one, other in zip(joined, apart, strict=True):
        groups.setdefault(one.group, []).append(other)
    for members in groups.values():
        first, *others = {member.group: member for member in members}.values()
        for other in others:
            _refuse_unequal(first, other, there, here)


def _refuse_unequal(first: Member, other: Member, there: str, here: str) -> None:
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
