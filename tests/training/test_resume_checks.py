"""A checkpoint goes on only with its own kind of optimizer, written by any version of torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lp_pipe.pipeline as pp
from lp_pipe.training.optimizer_state import refuse_hidden_state
from lp_pipe.training.resume_checks import refuse_other_optimizer
from tests.pipeline.plain_loop import D, launched, random_batches, squared_error


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


@pytest.mark.parametrize(
    ("kind", "saved", "message"),
    [
        ("AdamW", adam().defaults, "of another optimizer, AdamW, than this model's, Adam: give the model that one; to"),
        (None, {"lr": 0.1, "momentum": 0.9}, "of another optimizer than Adam: its options have momentum, and not amsg"),
    ],
    ids=["by its class", "by its options, where the class was not kept"],
)
def test_another_optimizer_is_named(kind: str | None, saved: dict[str, Any], message: str) -> None:
    with pytest.raises(pp.PipelineError, match=message):
        refuse_other_optimizer(adam(), adam().param_groups[0], saved, kind)


class Lookahead(torch.optim.SGD):
    """A wrapper as most are written: with weights of its own beside the state of its parameters."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow_weights": [], "counter": 3}


def test_a_state_that_belongs_to_no_parameter_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    """Regression: it was left out, and the training went on from the checkpoint as if it had just begun."""
    refuse_hidden_state(adam())
    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], squared_error, lambda named: Lookahead(named, lr=0.1))
    with launched("thread", model, random_batches([4]), stages=2, microbatches=2) as pipeline:
        pipeline.step()
        with pytest.raises(pp.PipelineError, match=r"Lookahead.state_dict\(\) has 'counter', 'slow_weights', which a"):
            pipeline.save(tmp_path)


class CountsItsSteps(torch.optim.SGD):
    """An optimizer with one count for all parameters, where torch's own state_dict() finds it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        super().step()


class CountsAndSaysIt(CountsItsSteps):
    def state_dict(self) -> Any:
        return super().state_dict()


@pytest.mark.parametrize("kind", [CountsItsSteps, CountsAndSaysIt])
def test_a_state_of_all_parameters_together_is_refused_when_it_is_saved_or_mirrored(kind: Any, tmp_path: Path) -> None:
    """Regression: it was left out: a resumed training counted anew, and go_back() left it as it was."""
    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], squared_error, lambda named: kind(named, lr=0.1))
    with launched("thread", model, random_batches([4]), stages=2, microbatches=2) as pipeline:
        pipeline.step()
        with pytest.raises(pp.PipelineError, match=rf"{kind.__name__}\.state has 'all', which is no parameter"):
            pipeline.save(tmp_path)
        with pytest.raises(pp.PipelineError, match=r"into self.state.parameter"):
            pipeline.mirror()


class SharesACount(torch.optim.SGD):
    """An optimizer with one tensor, which each parameter's state has."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        count = self.state[parameters[0]].get("steps", torch.zeros(())).add_(1)
        for parameter in parameters:
            self.state[parameter]["steps"] = count
        super().step()


def test_a_tensor_that_is_the_state_of_several_parameters_is_refused(tmp_path: Path) -> None:
    """Regression: each parameter got a copy, so one count a step became a count for each parameter after a load."""
    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], squared_error, lambda named: SharesACount(named, lr=0.1))
    with launched("thread", model, random_batches([4]), stages=2, microbatches=2) as pipeline:
        pipeline.step()
        with pytest.raises(pp.PipelineError, match="SharesACount keeps one tensor as 'steps' of several parameters"):
            pipeline.save(tmp_path)


class Two(torch.optim.Optimizer):
    """Made of others, which keep their state for themselves."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        matrices = [parameter for _, parameter in named if parameter.ndim == 2]
        others = [parameter for _, parameter in named if parameter.ndim != 2]
        self.parts = [torch.optim.Adam(matrices, lr=0.1), torch.optim.SGD(others, lr=0.1)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class TwoSharingAState(Two):
    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        super().__init__(named)
        for part in self.parts:
            part.state = self.state


class TwoInAList(Two):
    def state_dict(self) -> Any:
        return [part.state_dict() for part in self.parts]


class TwoByHand:
    """An optimizer that is no torch.optim.Optimizer."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        self.inner = Two(named)
        self.param_groups = self.inner.param_groups

    def step(self) -> None:
        self.inner.step()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Two, "Two wraps other optimizers, Adam among them"),
        (TwoInAList, r"TwoInAList.state_dict\(\) is no dict of 'state' and 'param_groups'"),
        (TwoByHand, r"TwoByHand has neither a state_dict\(\) nor a state"),
    ],
)
def test_optimizers_made_of_others_are_refused_if_their_state_would_be_lost(
    kind: Any, message: str, tmp_path: Path
) -> None:
    # Moments were not in the checkpoint, and nobody said so; or a TypeError from inside.
    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], squared_error, kind)
    with launched("thread", model, random_batches([4]), stages=2, microbatches=2) as pipeline:
        pipeline.step()
        with pytest.raises(pp.PipelineError, match=message):
            pipeline.save(tmp_path)


def test_such_that_share_one_state_go_on_as_if_nothing_had_happened_with_other_cuts(tmp_path: Path) -> None:
    batches, found = random_batches([4, 4, 4]), []
    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], squared_error, TwoSharingAState)
    for stages in (2, 1):
        with launched("thread", model, batches, stages=stages, microbatches=2) as pipeline:
            if stages == 2:
                pipeline.step()
                pipeline.save(tmp_path)
            pipeline.load(tmp_path)
            list(pipeline.steps())
            found.append(pipeline.fingerprint())
    assert found[0] == found[1]
