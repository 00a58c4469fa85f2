"""Changes of the stages' modules in the middle of training: freeze, drop rates, prune, read norms."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import assert_same_state, launched, sgd

BATCH = torch.randn(8, 8), torch.randint(5, (8,))


class WeightedLoss(nn.Module):
    kl = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.kl = 0.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) + self.kl * output.pow(2).mean()


def model(**options: Any) -> pp.Model:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 5)]
    return pp.Model(layers, WeightedLoss(), sgd, **options)


def freeze(modules: dict[str, nn.Module]) -> list[str]:
    """Freeze layers as a user does, on any stage."""
    for name, module in modules.items():
        if name == "0":
            module.requires_grad_(False)
        elif isinstance(module, nn.BatchNorm1d):
            module.eval()
        elif isinstance(module, nn.Dropout):
            module.p = 0.0
        elif name == "loss":
            module.kl = 10.0
    return sorted(modules)


def halve(modules: dict[str, nn.Module]) -> None:
    for module in modules.values():
        if isinstance(module, nn.Linear):
            module.weight.mul_(0.5)


def test_changed_modules_count_from_the_next_step_on(mode: str) -> None:
    with launched(mode, model(), stages=2, microbatches=2) as pipeline:
        pipeline.step(BATCH)
        before, loss = pipeline.state_dict(), pipeline.evaluate([BATCH]).loss
        assert sorted(name for names in pipeline.apply(freeze) for name in names) == ["0", "1", "2", "3", "loss"]
        assert pipeline.evaluate([BATCH]).loss > loss
        pipeline.step(BATCH)
        after = pipeline.state_dict()
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert torch.equal(before["1.running_mean"], after["1.running_mean"])
    assert not torch.equal(before["3.weight"], after["3.weight"])


@pytest.mark.parametrize("stages", [1, 3])
def test_a_checkpoint_has_the_changes_and_load_undoes_later_ones(tmp_path: Path, stages: int) -> None:
    with launched("thread", model(), stages=2, microbatches=2) as pipeline:
        pipeline.step(BATCH)
        pipeline.save(tmp_path / "before")
        pipeline.apply(freeze)
        pipeline.apply(halve)
        pipeline.save(tmp_path / "after")
        pipeline.step(BATCH)
        frozen = pipeline.state_dict()
        pipeline.load(tmp_path / "before")
        pipeline.step(BATCH)
        thawed = pipeline.state_dict()
    for folder, expected in (("after", frozen), ("before", thawed), ("after", frozen)):
        with launched("thread", model(), stages=stages, microbatches=2) as pipeline:
            pipeline.load(tmp_path / folder)
            pipeline.step(BATCH)
            assert_same_state(pipeline.state_dict(), expected)


def test_callbacks_are_called_once_before_their_step_also_over_a_resume(tmp_path: Path) -> None:
    options: dict[str, Any] = {"callbacks": {1: halve, 2: freeze}}
    with launched("thread", model(**options), stages=2, microbatches=2) as pipeline:
        for step in range(4):
            pipeline.save(tmp_path / str(step))
            pipeline.step(BATCH)
        expected = pipeline.state_dict()
    with launched("thread", model(), stages=2, microbatches=2) as pipeline:
        for change in (None, halve, freeze, None):
            if change is not None:
                pipeline.apply(change)
            pipeline.step(BATCH)
        assert_same_state(pipeline.state_dict(), expected)
    for step in range(4):
        with launched("thread", model(**options), stages=1, microbatches=2) as pipeline:
            pipeline.load(tmp_path / str(step))
            for _ in range(step, 4):
                pipeline.step(BATCH)
            assert_same_state(pipeline.state_dict(), expected)


def test_the_plain_loop_of_check_has_the_callbacks_too() -> None:
    assert pp.check(model(callbacks={1: halve, 2: freeze}), [BATCH] * 3, stages=2, microbatches=2)


def misspelt(modules: dict[str, nn.Module]) -> None:
    for module in modules.values():
        module.eval()
    modules["3"].bias.no_such_method()  # type: ignore[union-attr,operator]


def test_a_function_that_fails_leaves_all_stages_as_they_were() -> None:
    with launched("thread", model(), stages=2, microbatches=2) as pipeline:
        with pytest.raises((KeyError, AttributeError)):
            pipeline.apply(misspelt)
        modes = pipeline.apply(lambda modules: {name: module.training for name, module in modules.items()})
        assert {**modes[0], **modes[1]} == dict.fromkeys(["0", "1", "2", "3", "loss"], True)
        assert pipeline.step(BATCH).step == 0

        def half_done(modules: dict[str, nn.Module]) -> None:
            if "3" in modules:
                raise ValueError("not this stage")
            halve(modules)

        with pytest.raises(ValueError, match="not this stage"):
            pipeline.apply(half_done)
        with pytest.raises(pp.PipelineError, match="not at the same step"):
            pipeline.step(BATCH)


@pytest.mark.parametrize(
    "change",
    [
        lambda modules: setattr(modules["0"], "extra", nn.Linear(1, 1)),
        lambda modules: modules["0"].register_forward_hook(print),
        lambda modules: nn.utils.parametrizations.weight_norm(modules["0"]),
    ],
    ids=["submodule", "hook", "parametrization"],
)
def test_what_a_checkpoint_could_not_keep_is_refused(change: Any) -> None:
    with (
        launched("thread", model(), stages=1) as pipeline,
        pytest.raises((pp.PipelineError, lp.RemoteError), match="'0'"),
    ):
        pipeline.apply(change)


def test_wrong_callbacks_are_refused() -> None:
    with pytest.raises(pp.PipelineError, match="callbacks"):
        model(callbacks=[freeze])
