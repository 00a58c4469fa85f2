"""Layers that write in place to a buffer which they also compute with train as in the plain loop."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.written_buffers import WrittenBuffers
from tests.pipeline.plain_loop import D, PlainLoop, assert_same_state, launched, random_batches, sgd, squared_error

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([8, 8, 6])


class RunningScale(nn.Module):
    """Divides by a running average of its inputs' size, which autograd saves for the backward."""

    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(D))
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            size = self.size.data if self.hidden else self.size
            with torch.no_grad():
                size.mul_(0.9).add_(0.1 * x.abs().mean((0, 1)))
        return x / self.size


@pytest.mark.parametrize("hidden", [False, True], ids=["counted writes", "writes to .data"])
@pytest.mark.parametrize(
    "options",
    [{"schedule": "gpipe"}, {"schedule": "1f1b", "recompute": "full"}, {"schedule": "zb_h1"}],
    ids=lambda options: "-".join(options.values()),
)
def test_each_backward_has_the_buffer_of_its_forward(options: dict[str, Any], hidden: bool) -> None:
    """Torch refused them (modified by an inplace operation), because other forwards had come between."""
    linears = [pp.Layer(nn.Linear, D, D) for _ in range(3)]
    scale = pp.Layer(RunningScale, hidden)
    model = pp.Model([linears[0], scale, linears[1], scale, linears[2]], squared_error, sgd)
    plain = PlainLoop(model, 4)
    with launched("thread", model, BATCHES, stages=2, microbatches=4, **options) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


class SharesMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:2])
        self.register_buffer("one", torch.zeros(2))
        self.register_buffer("same", self.one)
        self.register_buffer("constant", torch.zeros(2))


def test_what_is_one_buffer_stays_one() -> None:
    module = SharesMemory()
    before = dict(module.named_buffers(remove_duplicate=False))
    buffers = WrittenBuffers([module])
    buffers.renew()  # of a forward that has not been seen yet
    with buffers.watched():
        module.whole += 1
        module.one += 1
    buffers.renew()
    after = dict(module.named_buffers(remove_duplicate=False))
    assert {name for name in before if after[name] is not before[name]} == {"one", "same"}
    assert after["one"] is after["same"]
    assert torch.equal(after["one"], torch.ones(2))
