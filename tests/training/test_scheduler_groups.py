"""A scheduler's state has lists with an entry for each parameter group; other stages have other groups."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import lp_pipe.pipeline as pp
from lp_pipe.training.optimizer_state import values_of_group, with_group_values
from tests.pipeline.plain_loop import D, PlainLoop, assert_same_state, launched, random_batches, squared_error


def test_values_of_groups_are_taken_apart_and_put_together() -> None:
    state = {
        "last_epoch": 3,
        "base_lrs": [0.1, 0.2],
        "inner": [{"lr_lambdas": [None, {"a": 1}]}, {"milestones": [4, 5]}],
    }
    values = [values_of_group(state, 2, group) for group in (0, 1)]
    assert values[1] == {("base_lrs",): 0.2, ("inner", 0, "lr_lambdas"): {"a": 1}}
    own = {"last_epoch": 0, "base_lrs": [7.0, 8.0, 9.0], "inner": [{"lr_lambdas": [None] * 3}, {"milestones": [4, 5]}]}
    got = with_group_values(state, own, [values[1], None, values[0]])
    assert got == {
        "last_epoch": 3,
        "base_lrs": [0.2, 8.0, 0.1],
        "inner": [{"lr_lambdas": [{"a": 1}, None, None]}, {"milestones": [4, 5]}],
    }
    assert state["base_lrs"] == [0.1, 0.2]


def test_a_state_of_another_kind_is_left_to_the_scheduler() -> None:
    assert with_group_values({"factor": 2}, {"inner": [{"base_lrs": [1.0]}]}, [{("inner", 0, "base_lrs"): 3.0}]) == {
        "factor": 2
    }


def one_group_a_layer(named: Any) -> torch.optim.Optimizer:
    """The learning rate decays with depth, as when a pretrained model is trained on."""
    groups: dict[int, list[nn.Parameter]] = {}
    for name, parameter in named:
        groups.setdefault(int(name.split(".")[0]), []).append(parameter)
    return torch.optim.AdamW([{"params": group, "lr": 0.02 * 0.5 ** (5 - layer)} for layer, group in groups.items()])


class Decay:
    """A function with a state, which torch keeps for each group."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, step: int) -> float:
        self.factor *= 0.8
        return self.factor


class ToPeak(schedulers.LRScheduler):
    """A user's own, with a list of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.peak_lrs = [3 * group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [peak / (3 + abs(self.last_epoch - 2)) for peak in self.peak_lrs]


SCHEDULERS: dict[str, Any] = {
    "one of the user's own": ToPeak,
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "lambdas with a state": lambda o: schedulers.LambdaLR(o, [Decay() for _ in o.param_groups]),
    "sequential": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, total_iters=1), schedulers.LambdaLR(optimizer, lambda step: 1 / (2 + step))],
        [1],
    ),
}


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_other_cuts_go_on_with_the_learning_rate_of_each_layer(tmp_path: Path, scheduler: str) -> None:
    """Regression: all stages got the list of one, and so its learning rates, or an error in the first update."""
    layers = [pp.Layer(nn.Linear, D, D) for _ in range(6)]
    model = pp.Model(layers, squared_error, one_group_a_layer, SCHEDULERS[scheduler])
    batches = random_batches([4, 4, 4, 4])
    plain = PlainLoop(model, 2)
    plain.steps(batches)
    with launched("thread", model, batches, stages=[2], microbatches=2) as pipeline:
        list(pipeline.steps(2))
        pipeline.save(tmp_path)
    for stages in ([2], [3], 1, 4):
        with launched("thread", model, batches, stages=stages, microbatches=2) as pipeline:
            pipeline.load(tmp_path)
            list(pipeline.steps())
            assert_same_state(pipeline.state_dict(), plain.state_dict())
