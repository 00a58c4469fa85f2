"""Outputs and input gradients of a step: for parts that are trained outside of the pipeline, and adversarial inputs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import launched, sgd

X, Y = torch.randn(6, 8), torch.randint(5, (6,))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 5)]


def model(**options: Any) -> pp.Model:
    return pp.Model(layers(), nn.functional.cross_entropy, sgd, **options)


def plain_step(modules: list[nn.Module], x: Tensor, y: Tensor, microbatches: int) -> Tensor:
    """The outputs of one step of a plain loop; gradients are left in the leaves."""
    outputs = []
    for xs, ys in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        outputs.append(nn.Sequential(*modules)(xs))
        (nn.functional.cross_entropy(outputs[-1], ys) * (len(ys) / len(y))).backward()
    return torch.cat([output.detach() for output in outputs])


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("thread", {"stages": 2}),
        ("thread", {"stages": 2, "schedule": "zb_h1"}),
        ("thread", {"stages": 1, "replicas": 2}),
        ("thread", {"stages": 2, "recompute": "full"}),
        ("thread", {"stages": 1, "schedule": "interleaved", "chunks": 2}),
        ("process", {"stages": 2, "schedule": "zb_h1"}),
        ("process", {"stages": 1, "replicas": 2}),
    ],
    ids=str,
    indirect=["mode"],
)
def test_an_encoder_outside_of_the_pipeline_is_trained_as_in_one_process(mode: str, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    encoder, plain_encoder = nn.Linear(8, 8), nn.Linear(8, 8)
    plain_encoder.load_state_dict(encoder.state_dict())
    modules = layers()
    with launched(mode, model(), microbatches=3, **options) as pipeline:
        hidden = encoder(X)
        result = pipeline.step((hidden, Y), outputs=True, input_grad=True)
        hidden.backward(result.input_grad)
        plain_hidden = plain_encoder(X)
        leaf = plain_hidden.detach().requires_grad_()
        assert torch.equal(result.outputs, plain_step(modules, leaf, Y, 3))
        assert torch.equal(result.input_grad, leaf.grad)
        plain_hidden.backward(leaf.grad)
        assert torch.equal(encoder.weight.grad, plain_encoder.weight.grad)
        again = pipeline.step((X, Y))
        assert again.outputs is None and again.input_grad is None


def test_an_input_that_requires_a_gradient_is_refused_unless_it_is_asked_for() -> None:
    encoder = nn.Linear(8, 8)
    with launched("thread", model(), stages=2, microbatches=2) as pipeline:
        for x, y in ((encoder(X), Y), (X.clone().requires_grad_(), Y)):
            with pytest.raises(pp.PipelineError, match="input_grad=True"):
                pipeline.step((x, y))
        with pytest.raises(pp.PipelineError, match="target"):
            pipeline.step((X, torch.rand(6, 5, requires_grad=True)), input_grad=True)
        assert pipeline.current_step() == 0
        assert pipeline.evaluate([(encoder(X), Y)]).loss > 0
        assert pipeline.step((X, Y)).step == 0


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return self.table(given["ids"]) + given["prompt"]


def test_gradients_have_the_structure_of_the_input() -> None:
    """A learned prompt beside token numbers, and a tensor that the loss does not depend on."""
    given = {"ids": torch.arange(4), "prompt": torch.randn(4, 8), "unused": torch.randn(4, 2)}
    two = pp.Model([TwoInputs(), nn.Linear(8, 5)], nn.functional.cross_entropy, sgd)
    with launched("thread", two, stages=2, microbatches=2) as pipeline:
        found = pipeline.step((given, torch.tensor([0, 1, 2, 3])), input_grad=True).input_grad
    assert found["ids"] is None
    assert found["prompt"].shape == (4, 8) and bool(found["prompt"].abs().sum() > 0)
    assert torch.equal(found["unused"], torch.zeros(4, 2))


def test_asynchronous_schedules_refuse_both() -> None:
    with launched("thread", model(), stages=2, schedule="pipedream", microbatches=2) as pipeline:
        with pytest.raises(pp.PipelineError, match="asynchronous"):
            pipeline.step((X, Y), outputs=True)
        assert pipeline.step((X, Y)).step == 0
