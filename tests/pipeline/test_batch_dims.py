"""Batches whose samples are not along the first dimension: time first, shared masks, positions, lists of samples."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import lp_pipe as lp
import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import launched, sgd

T, B, D = 8, 6, 4


def flat_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


class Recurrent(nn.Module):
    """torch's default: (time, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Rotary(nn.Module):
    """Positions of three axes (3, batch, time), and a mask that all samples share (time, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, positions, mask = given
        assert positions.shape == (3, *x.shape[:2]) and mask.shape == (T, 1)
        return self.inner(x) * torch.cos(positions.float().sum(0))[..., None] * mask


class Lengths(nn.Module):
    """A list with one tensor of any length for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, samples: list[Tensor]) -> Tensor:
        return torch.stack([self.inner(sample).mean(0) for sample in samples])


def plain_losses(layers: list[nn.Module], batches: list[tuple[Any, Tensor]]) -> list[float]:
    """Return the losses of the micro-batches, which here are made by hand."""
    return [flat_loss(nn.Sequential(*layers)(x), y).item() for x, y in batches]


@pytest.mark.parametrize(
    ("mode", "microbatches"), [*(("thread", count) for count in (2, 3, 4)), ("process", 3)], indirect=["mode"]
)
def test_time_first_batches_are_cut_at_samples(mode: str, microbatches: int) -> None:
    torch.manual_seed(0)
    layers = [Recurrent(), nn.Linear(D, 5)]
    x, y = torch.randn(T, B, D), torch.randint(5, (T, B))
    model = pp.Model(layers, flat_loss, sgd, batch_dims=1)
    parts = list(zip(x.chunk(microbatches, 1), y.chunk(microbatches, 1), strict=True))
    losses = plain_losses(layers, parts)
    expected = sum(loss * (target.shape[1] / B) for loss, (_, target) in zip(losses, parts, strict=True))
    with launched(mode, model, stages=2, microbatches=microbatches) as pipeline:
        assert pipeline.evaluate([(x, y)]).loss == pytest.approx(plain_losses(layers, [(x, y)])[0])
        result = pipeline.step((x, y), outputs=True, input_grad=True)
        assert result.loss == pytest.approx(expected)
        assert result.outputs.shape == (T, B, 5) and result.input_grad.shape == x.shape


@pytest.mark.parametrize("where", ["leaves", "model"])
def test_positions_and_shared_masks_stay_with_their_samples(where: str) -> None:
    torch.manual_seed(0)
    layers = [Rotary(), nn.Linear(D, 5)]
    x, y = torch.randn(B, T, D), torch.randint(5, (B, T))
    positions, mask = torch.arange(T).expand(3, B, T).contiguous(), torch.rand(T, 1)
    dims = None if where == "leaves" else ((0, 1, None), 0)
    given = (x, pp.cut(positions, dim=1), pp.whole(mask)) if where == "leaves" else (x, positions, mask)
    with launched("thread", pp.Model(layers, flat_loss, sgd, batch_dims=dims), stages=2, microbatches=3) as pipeline:
        assert pipeline.forward((x, positions, mask)).shape == (B, T, 5)
        whole = flat_loss(nn.Sequential(*layers)((x, positions, mask)), y).item()
        assert pipeline.evaluate([(given, y)]).loss == pytest.approx(whole)
        result = pipeline.step((given, y), input_grad=True)
    assert result.loss == pytest.approx(whole), "equal micro-batches: the mean of their means"
    leaf = mask.clone().requires_grad_()
    flat_loss(nn.Sequential(*layers)((x, positions, leaf)), y).backward()
    torch.testing.assert_close(result.input_grad[2], leaf.grad)  # over all micro-batches
    assert result.input_grad[1] is None


def test_a_list_of_samples_is_cut_between_them() -> None:
    torch.manual_seed(0)
    layers = [Lengths(), nn.Linear(D, 5)]
    samples, y = [torch.randn(length, D) for length in (2, 5, 3, 4)], torch.tensor([0, 1, 2, 3])
    expected = flat_loss(nn.Sequential(*layers)(samples), y).item()
    with launched("thread", pp.Model(layers, flat_loss, sgd), stages=2, microbatches=2) as pipeline:
        assert pipeline.step((pp.cut(samples), y)).loss == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((torch.randn(B, T, D), torch.zeros(3, B, T)), r"6 and 3 samples.*pp\.cut"),
        ((torch.randn(B, T, D), torch.ones(T, T)), r"6 and 8 samples.*pp\.whole"),
        (pack_sequence([torch.ones(3, D), torch.ones(2, D)]), "PackedSequence"),
    ],
    ids=["positions", "mask", "packed"],
)
def test_what_may_have_its_samples_elsewhere_is_refused(given: Any, words: str) -> None:
    model = pp.Model([nn.Linear(D, 5)], flat_loss, sgd)
    with launched("thread", model, stages=1, microbatches=3) as pipeline, pytest.raises(pp.PipelineError, match=words):
        pipeline.step((given, torch.zeros(B, dtype=torch.long)))


@pytest.mark.parametrize(
    "layer",
    [Recurrent(), nn.TransformerEncoderLayer(D, 2, 8), pp.Layer(nn.GRU, D, D)],
    ids=["LSTM", "transformer", "factory"],
)
def test_modules_that_take_time_first_need_a_word(layer: Any) -> None:
    program = lp.Program("refused")
    with pytest.raises((pp.PipelineError, lp.NodeError), match="batch_dims"):
        pp.add_pipeline(program, pp.Model([layer, nn.Linear(D, 5)], flat_loss, sgd), stages=2)
        lp.launch(program, "thread").wait(30)


def test_batch_dims_of_another_structure_are_refused() -> None:
    model = pp.Model([nn.Linear(D, 5)], flat_loss, sgd, batch_dims=({"x": 0}, 0))
    batch = torch.randn(B, D), torch.zeros(B, dtype=torch.long)
    with launched("thread", model, stages=1) as pipeline, pytest.raises(pp.PipelineError, match="batch_dims"):
        pipeline.step(batch)
    with pytest.raises(pp.PipelineError, match="batch_dims"):
        pp.add_pipeline(lp.Program("x"), pp.Model([nn.Linear(1, 1)], flat_loss, sgd, batch_dims="time"), stages=1)
