"""Parameters to which forwards write: fine where one stage has them, refused where copies would differ."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import D, PlainLoop, assert_same_state, launched, random_batches, sgd, squared_error

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([8, 6, 8])


class Tokens(nn.Module):
    """Makes the rows that it looks up shorter, in its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, D, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.table((x.detach().abs() * 5).long().sum(2) % 11)
        return x + rows


class Decays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.shift.mul_(0.9)
        return x + self.shift


def _model(layer: type[nn.Module], **options: Any) -> pp.Model:
    layers = [pp.Layer(nn.Linear, D, D), pp.Layer(layer), pp.Layer(nn.Linear, D, D), pp.Layer(layer)]
    return pp.Model(layers, squared_error, sgd, **options)


@pytest.mark.parametrize("options", [{"schedule": "gpipe"}, {"schedule": "zb_h1"}, {"recompute": "full"}], ids=str)
def test_a_table_with_a_largest_norm_trains_to_the_same_bits(options: dict[str, Any]) -> None:
    plain = PlainLoop(_model(Tokens), 4)
    with launched("thread", _model(Tokens), BATCHES, stages=[2], microbatches=4, **options) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


REFUSED: dict[str, tuple[type[nn.Module], dict[str, Any], dict[str, Any], str]] = {
    "replicas": (Tokens, {}, {"replicas": (1, 2)}, r"'3.table.weight', .* the stage's other replicas have it"),
    "tied": (Tokens, {"tied": (("1.table.weight", "3.table.weight"),)}, {}, "'1.table.weight', .* stages 0 and 1"),
    "recompute": (Decays, {}, {"recompute": "full"}, "layers 0 to 1: cannot be recomputed, because a forward writes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_copies_that_would_differ_are_refused(name: str) -> None:
    # Each replica, or stage that has the weight, wrote to its own: in silence they had different parameters.
    layer, of_model, options, match = REFUSED[name]
    with (
        launched("thread", _model(layer, **of_model), stages=[2], microbatches=4, **options) as pipeline,
        pytest.raises(pp.PipelineError, match=match),
    ):
        pipeline.step(BATCHES[0])
