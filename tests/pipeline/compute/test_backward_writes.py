"""The writes of a backward to buffers: they are as in one process, or the step says why not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import D, PlainLoop, T, assert_same_state, launched, random_batches, sgd, squared_error

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([8, 6])


class Checkpointed(nn.Module):
    """Runs a layer again in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return output


class Average(nn.Module):
    """Computes with a running average of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.size = 0.9 * self.size + 0.1 * x.detach().abs().mean((0, 1))
        return x / self.size


def _model(layer: nn.Module) -> pp.Model:
    return pp.Model([nn.Linear(D, D), layer, nn.Linear(D, D)], squared_error, sgd)


WRITERS = {
    "statistics of BatchNorm1d": lambda: nn.BatchNorm1d(T),
    "buffer 'size' of Average": Average,
    "buffer 'weight_[uv]' of Linear": lambda: nn.utils.spectral_norm(nn.Linear(D, D)),
}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("what", WRITERS, ids=["BatchNorm", "an average", "spectral norm"])
def test_a_layer_that_counts_again_in_its_backward_trains_as_in_one_process_or_is_refused(
    what: str, schedule: str
) -> None:
    """Later forwards had not seen what it wrote, and it saw what they wrote: others came of it, gradients too."""
    model = _model(Checkpointed(WRITERS[what]()))
    plain = PlainLoop(model, 2)
    with launched("thread", model, BATCHES, stages=[1], microbatches=2, schedule=schedule) as pipeline:
        if schedule == "gpipe":
            with pytest.raises(pp.PipelineError, match=f"a backward changes {what}.*recompute="):
                list(pipeline.steps())
            return
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)  # each backward comes at once
        assert_same_state(pipeline.state_dict(), plain.state_dict())


class WatchesGradients(nn.Module):
    """Keeps a running average of its output's gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.register_buffer("size", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        if y.requires_grad:
            y.register_hook(self.seen)
        return y

    def seen(self, gradient: Tensor) -> None:
        self.size = 0.9 * self.size + 0.1 * gradient.abs().mean()


@pytest.mark.parametrize("options", [{"schedule": "gpipe"}, {"schedule": "zb_h1"}], ids=str)
def test_a_hook_of_an_activation_counts_once_in_a_split_backward_too(options: dict[str, Any]) -> None:
    model = _model(WatchesGradients())
    plain = PlainLoop(model, 4)
    with launched("thread", model, BATCHES, stages=[1], microbatches=4, **options) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def _updates_itself() -> nn.Module:
    layer = nn.Linear(D, D)

    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(0.1 * parameter.grad)
        parameter.grad = None

    layer.weight.register_post_accumulate_grad_hook(update)
    return layer


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_an_optimizer_in_the_backward_trains_as_in_one_process_or_is_refused(schedule: str) -> None:
    """Forwards of later micro-batches had the old weights, in silence."""
    model = pp.Model([pp.Layer(_updates_itself), nn.Linear(D, D), nn.Tanh()], squared_error, sgd)
    refused = pytest.raises(pp.PipelineError, match="a backward changes parameter 'weight' of Linear")
    with launched("thread", model, BATCHES, stages=[1], microbatches=2, schedule=schedule) as pipeline, refused:
        list(pipeline.steps())
    assert pp.check(model, BATCHES, stages=[1], microbatches=1, schedule=schedule)
