"""A checkpoint goes on with the kind of optimizer that it is of, whatever version of torch has written it."""

from typing import Any

import pytest
import torch
from torch import nn

from lp_pipe.pipeline.saving.same_optimizer import refuse_other_optimizer


def adam() -> torch.optim.Adam:
    return torch.optim.Adam([nn.Parameter(torch.ones(1))])


@pytest.mark.parametrize(
    ("removed", "added"),
    [
        ([], {}),
        (["decoupled_weight_decay"], {}),
        ([], {"from_the_next_torch": 1}),
        (["fused"], {"initial_lr": 0.1, "max_lr": 1.0, "min_lr": 0.0}),
    ],
    ids=["the same", "older", "newer", "older, with a scheduler"],
)
def test_the_same_optimizer_may_be_of_another_version(removed: list[str], added: dict[str, Any]) -> None:
    saved = {name: value for name, value in adam().defaults.items() if name not in removed}
    refuse_other_optimizer(adam(), adam().param_groups[0], {**saved, **added})


def test_a_users_own_options_of_a_group_are_no_other_optimizers() -> None:
    group = {**adam().param_groups[0], "decays": True}
    saved = {name: value for name, value in group.items() if name not in ("params", "fused")}
    refuse_other_optimizer(adam(), group, saved)
