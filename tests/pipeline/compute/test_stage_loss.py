"""A loss may keep something in buffers: it goes on, and comes back, with the weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import D, PlainLoop, assert_same_state, launched, random_batches, sgd

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([4, 6, 4, 5])


class AgainstAverage(nn.Module):
    """A loss that compares outputs with their running average, as DINO's does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(D))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.tensor(2.0))
        self.norm = nn.BatchNorm1d(D, affine=False)
        self.center: Tensor
        self.calls: Tensor
        self.scale: Tensor

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        flat = output.reshape(-1, D)
        self.center = 0.9 * self.center + 0.1 * flat.detach().mean(0)
        self.calls += 1
        loss = ((self.norm(flat) - self.center) * self.scale - target.reshape(-1, D)).square().mean()
        if target.isnan().any():
            raise ArithmeticError("a target is no number")
        return loss


def model() -> pp.Model:
    return pp.Model([pp.Layer(nn.Linear, D, D), pp.Layer(nn.Tanh), pp.Layer(nn.Linear, D, D)], AgainstAverage(), sgd)


def test_evaluations_and_failed_steps_leave_it_as_it_was() -> None:
    plain = PlainLoop(model(), 2)
    wanted = plain.steps(BATCHES)
    x, y = BATCHES[0]
    losses = []
    with launched("thread", model(), BATCHES, stages=2, microbatches=2) as pipeline:
        for _ in BATCHES:
            pipeline.evaluate(BATCHES[:2])
            with pytest.raises(ArithmeticError):
                pipeline.step((x, torch.full_like(y, torch.nan)))
            losses.append(pipeline.step().loss)
        assert_same_state(pipeline.state_dict(), plain.state_dict())
    assert losses == wanted


def test_a_checkpoint_has_it_for_any_cut(tmp_path: Path) -> None:
    with launched("thread", model(), BATCHES, stages=2, microbatches=2) as pipeline:
        pipeline.save(tmp_path / "start")
        begin = [pipeline.step().loss, pipeline.step().loss]
        pipeline.save(tmp_path / "middle")
        end = [pipeline.step().loss, pipeline.step().loss]
        pipeline.load(tmp_path / "start")  # which has none of it, for nothing had been written
        assert [pipeline.step().loss, pipeline.step().loss] == begin
    with launched("thread", model(), BATCHES, stages=3, microbatches=2) as pipeline:
        pipeline.load(tmp_path / "middle")
        assert [pipeline.step().loss, pipeline.step().loss] == end


def test_replicas_go_on_from_the_same() -> None:
    """All replicas have the first one's buffers after a step, as with a layer's buffers."""
    with launched("thread", model(), BATCHES, stages=2, replicas=(1, 2), microbatches=2) as pipeline:
        pipeline.step()
        once, on_each_replica = (pipeline.evaluate(BATCHES[:1] * count).loss for count in (1, 2))
    assert once == on_each_replica
