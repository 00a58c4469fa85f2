"""Parameters that a forward uses and no stage would train: the first step names them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.compute.untrained_parameters import refuse_detached
from tests.pipeline.plain_loop import D, launched, random_batches, sgd, squared_error

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([4, 6])


class Net(nn.Module):
    """A module that has its loss as a method, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return squared_error(output * self.scale, target)

    def penalised(self, output: Tensor, target: Tensor) -> Tensor:
        return squared_error(output, target) + 0.1 * sum(p.square().sum() for p in self.body.parameters())


def in_a_closure(net: Net) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: net.penalised(output, target)


LOSSES: dict[str, Callable[[Net], Any]] = {
    "method": lambda net: net.loss,
    "penalty": lambda net: net.penalised,
    "closure": in_a_closure,
}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_the_models_own_parameters_is_refused(loss: str, stages: int, recompute: str) -> None:
    """Regression: the gradients went to the user's modules, which are not trained, and the penalty was lost."""
    net = Net()
    model = pp.Model(net.body, LOSSES[loss](net), sgd)
    with pytest.raises(pp.PipelineError, match=r"the loss has used a parameter of shape \[.*\], which no stage would"):
        pp.check(model, BATCHES, stages=stages, microbatches=2, recompute=recompute)


def detached_error(output: Tensor, target: Tensor) -> Tensor:
    return squared_error(output, target).detach()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "pipedream"])
@pytest.mark.parametrize(
    ("frozen", "loss", "message"),
    [
        (False, detached_error, "although the last layer's output has one: .*detach"),
        (True, squared_error, "because the last layer's output has none: all parameters are frozen"),
    ],
    ids=["detached loss", "frozen model"],
)
def test_a_loss_without_a_gradient_is_refused(schedule: str, frozen: bool, loss: Any, message: str) -> None:
    # It was torch's "element 0 of tensors does not require grad and does not have a grad_fn".
    layers = [nn.Linear(D, D).requires_grad_(not frozen) for _ in range(2)]
    with (
        launched("thread", pp.Model(layers, loss, sgd), BATCHES, stages=2, schedule=schedule) as pipeline,
        pytest.raises(pp.PipelineError, match=f"the loss has no gradient, .*{message}"),
    ):
        pipeline.step()


def test_what_a_loss_uses_without_a_gradient_is_nobodys_to_train() -> None:
    teacher, frozen = nn.Linear(D, D), nn.Linear(D, D).requires_grad_(False)

    def distilled(output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(target)
        return squared_error(output, wanted) + squared_error(frozen(output), target)

    assert pp.check(pp.Model(Net().body, distilled, sgd), BATCHES, stages=2, microbatches=2)


class Head(nn.Module):
    """Uses the embedding's weight, which it hides from `parameters()`."""

    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(D))
        self.first = [first]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.first[0].weight, self.bias)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_layer_with_another_layers_parameter_in_a_list_is_refused_where_a_cut_parts_them(
    schedule: str, recompute: str
) -> None:
    """Regression: its stage kept using its own copy while the other stage trained the parameter."""
    first = nn.Linear(D, D)
    model = pp.Model([first, nn.Tanh(), Head(first)], squared_error, sgd)
    assert pp.check(model, BATCHES, stages=1, microbatches=2, recompute=recompute)
    with pytest.raises(pp.PipelineError, match=r"a layer has used a parameter of shape .* that it has not registered"):
        pp.check(model, BATCHES, stages=2, schedule=schedule, microbatches=2, recompute=recompute)


class Listed(nn.Module):
    """A layer whose parameters are registered, and in a list that its forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.eye(D)), nn.Parameter(torch.eye(D))
        self.all = [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.all:
            x = torch.tanh(x @ weight)
        return x


def test_asynchronous_schedules_want_a_layers_own_parameters_by_their_names() -> None:
    # The message said that they were not registered, or of another layer.
    model = pp.Model([pp.Layer(Listed), nn.Linear(D, D)], squared_error, sgd)
    assert pp.check(model, BATCHES, stages=2, microbatches=2).equal
    with (
        launched("thread", model, BATCHES, stages=2, schedule="pipedream", microbatches=2) as pipeline,
        pytest.raises(pp.PipelineError, match=r"shape \[8, 8\].*registered, but .* \(a list"),
    ):
        pipeline.step()


def test_a_loss_without_gradient_names_the_grad_mode_that_the_script_has_set() -> None:
    output = torch.ones(2)
    with torch.no_grad(), pytest.raises(PipelineError, match="set_grad_enabled"):
        refuse_detached(output.sum(), has_output_gradient=output.requires_grad)
