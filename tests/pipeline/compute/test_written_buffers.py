"""Layers that write in place to a buffer which they also compute with train as in the plain loop."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from lp_pipe.training.write_tracker import WritePolicy, WriteTracker
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


@pytest.mark.parametrize("replicas", [1, 2])
def test_buffers_that_come_back_are_written_to_again(replicas: int) -> None:
    """Buffers come back after a failed step, and after each step on all replicas but the first one."""
    model = pp.Model([nn.Linear(D, D), RunningScale(), nn.Linear(D, D)], squared_error, sgd)
    options = {"stages": [1], "microbatches": 4, "replicas": replicas, "schedule": "gpipe"}
    (x, y), losses = BATCHES[0], []
    with launched("thread", model, BATCHES, **options) as pipeline:
        for _ in BATCHES:
            with pytest.raises(RuntimeError, match="must match the size"):
                pipeline.step((x, y[..., :3]))
            losses.append(pipeline.step().loss)
    with launched("thread", model, BATCHES, **options) as undisturbed:
        assert losses == [result.loss for result in undisturbed.steps()]


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
    buffers = WriteTracker(with_buffers=[module], buffers=WritePolicy.COPY)
    buffers.separate()  # of a forward that has not been seen yet
    with buffers.tracked():
        module.whole += 1
        module.one += 1
    buffers.separate()
    after = dict(module.named_buffers(remove_duplicate=False))
    assert {name for name in before if after[name] is not before[name]} == {"one", "same"}
    assert after["one"] is after["same"]
    assert torch.equal(after["one"], torch.ones(2))


class _Counting(torch.autograd.Function):
    """Counts in its backward, in the module's buffer or in the one that its forward had."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "CountsBackwards") -> Tensor:
        ctx.layer, ctx.backwards = layer, layer.backwards
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        counter = ctx.layer.backwards if ctx.layer.looks_up else ctx.backwards
        counter += 1
        return gradients[0], None


class CountsBackwards(nn.Module):
    def __init__(self, looks_up: bool) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.register_buffer("backwards", torch.zeros((), dtype=torch.int64))
        self.looks_up = looks_up

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        self.backwards += 0
        return self.counted(x)

    def counted(self, x: Tensor) -> Tensor:
        y: Tensor = _Counting.apply(x, self)  # type: ignore[no-untyped-call]
        return y


class CountsWeightBackwards(CountsBackwards):
    """Counts where the backward for the weights comes along, and the one for the inputs does not."""

    def __init__(self, looks_up: bool) -> None:
        super().__init__(looks_up)
        self.weight = nn.Parameter(torch.eye(D))

    def counted(self, x: Tensor) -> Tensor:
        return x @ super().counted(self.weight)


@pytest.mark.parametrize("looks_up", [True, False])
@pytest.mark.parametrize(
    ("layer", "schedule"),
    [(CountsBackwards, "gpipe"), (CountsWeightBackwards, "gpipe"), (CountsWeightBackwards, "zb_h1")],
    ids=["inputs", "weights", "deferred weights"],
)
def test_a_backward_writes_to_the_modules_buffer_or_is_told_to(
    layer: type[CountsBackwards], schedule: str, looks_up: bool
) -> None:
    """Regression: a write to the forward's tensor was lost, since later forwards used another one."""
    model = pp.Model([nn.Linear(D, D), layer(looks_up), nn.Linear(D, D)], squared_error, sgd)
    with launched("thread", model, BATCHES, stages=[1], microbatches=4, schedule=schedule) as pipeline:
        if not looks_up:
            with pytest.raises(pp.PipelineError, match=rf"{layer.__name__}\.backwards .*that its forward"):
                list(pipeline.steps())
            return
        list(pipeline.steps())
        state = pipeline.state_dict()
    assert state["1.forwards"] == state["1.backwards"] == 4 + 4 + 3
