"""A checkpoint goes on in the parameter groups that it was saved in, with all cuts."""

from typing import Any

import pytest
import torch

from lp_pipe.errors import PipelineError
from lp_pipe.training.resume_checks import GroupMember, refuse_other_groups


def saved(**groups: tuple[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return by name the first parameter of its group, and the options."""
    return {name: {"group": ("SGD", first), "options": options} for name, (first, options) in groups.items()}


def test_groups_of_several_workers_come_together_in_one() -> None:
    slow, fast = {"lr": 0.1}, {"lr": 0.2}
    before = saved(a=("a", slow), b=("b", fast), c=("c", slow), d=("d", fast))
    own = [GroupMember("a", slow, 0), GroupMember("c", slow, 0), GroupMember("b", fast, 1), GroupMember("d", fast, 1)]
    refuse_other_groups(own, before)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1), [0.1, 0.2]], ids=["number", "tensor", "list"])
def test_groups_with_the_same_options_may_be_cut_in_any_way(lr: Any) -> None:
    own = [GroupMember("a", {"lr": lr}, 0), GroupMember("b", {"lr": lr}, 1)]
    refuse_other_groups(own, saved(a=("a", {"lr": lr}), b=("a", {"lr": lr})))
    joined = [member._replace(group=0) for member in own]
    refuse_other_groups(joined, saved(a=("a", {"lr": lr}), b=("b", {"lr": lr})))


def test_the_programs_own_options_may_have_changed() -> None:
    """The saved ones win, as torch has it."""
    own = [GroupMember("a", {"lr": 0.5}, 0), GroupMember("b", {"lr": 0.6}, 1)]
    refuse_other_groups(own, saved(a=("a", {"lr": 0.1}), b=("b", {"lr": 0.1})))


def test_one_that_was_written_before_groups_were_kept_is_taken() -> None:
    own = [GroupMember("a", {"lr": 0.5}, 0), GroupMember("b", {"lr": 0.6}, 1)]
    refuse_other_groups(own, {"a": {"options": {"lr": 0.1}}, "b": {"options": {"lr": 0.1}}})


def test_two_parameters_and_what_differs_are_named() -> None:
    own = [GroupMember("a", {"lr": 0.5}, 0), GroupMember("b", {"lr": 0.5}, 0)]
    before = saved(a=("a", {"lr": torch.tensor(0.1)}), b=("b", {"lr": torch.tensor(0.2)}))
    with pytest.raises(PipelineError, match=r"has a and b in different parameter groups, .* in one \(where lr is"):
        refuse_other_groups(own, before)
