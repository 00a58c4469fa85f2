"""A loss or gradient that is not finite: which layer made it first, and what becomes of the step."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import (
    D,
    PlainLoop,
    T,
    assert_same_state,
    halve_every_two_steps,
    launched,
    layers_with_everything,
    model_with_everything,
    random_batches,
    sgd,
    squared_error,
)
from tests.pipeline.test_refusals import refuses

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    # torch's, when the very first step is skipped.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)`"),
]

BATCHES = random_batches([8] * 5)


def poisoned(batch: tuple[Tensor, Tensor], value: float, sample: int = 5) -> tuple[Tensor, Tensor]:
    """Return a batch with such a number in one sample; the sixth of eight is in the third of four micro-batches."""
    x = batch[0].clone()
    x[sample] = value
    return x, batch[1]


class Root(nn.Module):
    """A square root: below 0 there is none, and at 0 its slope is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(D, D), Root())
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x))


class ZeroWhere(nn.Module):
    """Zeros for samples that hold a 7, from a product that has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs() * (x.detach() != 7.0).all() + 0.0


class PlainLoopThatSkips(PlainLoop):
    """A plain loop in which a batch that is not finite only changes the step's number and the learning rate."""

    def step(self, batch: tuple[Any, Any]) -> float:
        if bool(batch[0].isfinite().all()):
            return super().step(batch)
        assert self.lr_scheduler is not None
        self.lr_scheduler.step()
        self.steps_done += 1
        return float("nan")


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {"stages": 3}),
        ("gpipe", {"stages": [6], "replicas": (2, 1)}),
        ("zb_h1", {"stages": 3, "recompute": "full", "clip_grad_norm": 0.1}),
        ("interleaved", {"stages": 2, "precision": "bf16"}),
        pytest.param("zbv", {"stages": 2}, marks=pytest.mark.slow),
        pytest.param("looped_bfs", {"stages": 2, "chunks": 2, "replicas": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_skipped_step_leaves_what_the_loop_without_its_update_has(schedule: str, options: dict[str, Any]) -> None:
    layers = layers_with_everything()
    replicas = {"gpipe": [2] * 6 + [1] * 3, "looped_bfs": [2] * 9}.get(schedule)  # of each layer's stage
    if replicas is not None:
        layers[3] = pp.Layer(nn.Identity)  # each replica has its own statistics
    model = model_with_everything(layers=layers)
    batches = [poisoned(batch, float("inf")) if step in (0, 2, 3) else batch for step, batch in enumerate(BATCHES)]
    with launched("thread", model, batches, schedule=schedule, microbatches=4, on_nan="skip", **options) as pipeline:
        results = list(pipeline.steps())
        state = pipeline.state_dict()
    plain = PlainLoopThatSkips(model, 4, options.get("clip_grad_norm"), options.get("precision", "fp32"), replicas)
    losses = plain.steps(batches)
    assert_same_state(state, plain.state_dict())
    assert [result.skipped for result in results] == [True, False, True, True, False]
    assert [result.loss for result in results if not result.skipped] == [losses[1], losses[4]]
    assert all(("micro-batch 2, stage 0" in result.why_skipped) == result.skipped for result in results)


def test_stopping_names_step_micro_batch_stage_and_layer_and_changes_nothing() -> None:
    model = pp.Model(
        [pp.Layer(nn.Linear, D, D), nn.BatchNorm1d(T), pp.Layer(Block, name="middle"), pp.Layer(nn.Linear, D, D)],
        squared_error,
        sgd,
    )
    plain = PlainLoop(model, 4)
    with launched("thread", model, stages=[2], microbatches=4, on_nan="stop") as pipeline:
        before = pipeline.state_dict()
        with pytest.raises(pp.NonFiniteError) as caught:
            pipeline.step(BATCHES[0])  # the root of something negative
        assert (
            "step 0: the loss is nan, first in micro-batch 0, stage 1 (stages/1): the output of layer 2.middle, in its "
            "module 'inner.1'; parameters, buffers and optimizer are as before the step"
        ) in str(caught.value)
        error = caught.value
        assert (error.step, error.microbatch, error.stage, error.layer) == (0, 0, 1, "2.middle")
        assert_same_state(pipeline.state_dict(), before)
        assert pipeline.current_step() == 0
        assert_same_state(before, plain.state_dict())


def make_identity(layer: Any) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.eye(D))
        layer.bias.zero_()


def infinite_slope(output: Tensor, target: Tensor) -> Tensor:
    return (output - output.detach()).sum().abs().sqrt() + target.sum() * 0.0


def loss_of_infinity(output: Tensor, target: Tensor) -> Tensor:
    return output.mean() / (target - target).sum()


@pytest.mark.parametrize(
    ("layers", "loss", "microbatch", "place"),
    [
        pytest.param(
            [nn.Linear(D, D), ZeroWhere(), Root(), nn.Linear(D, D)],
            squared_error,
            2,
            "step 0: the gradients are not finite, first in micro-batch 2, stage 1 (stages/1): the gradient of the "
            "input of layer 2.Root; parameters",
            id="backward of a layer",
        ),
        pytest.param(
            [nn.Linear(D, D), nn.Linear(D, D)],
            infinite_slope,
            0,
            "step 0: the gradients are not finite, first in micro-batch 0, stage 1 (stages/1): the gradient of the "
            "input of the loss function; parameters",
            id="backward of the loss",
        ),
        pytest.param(
            [nn.Linear(D, D), nn.Linear(D, D)],
            loss_of_infinity,
            0,
            ", first in micro-batch 0, stage 1 (stages/1): the output of the loss function; ",
            id="loss",
        ),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_first_layer_of_the_backward_is_the_last_one(
    layers: list[nn.Module], loss: Any, microbatch: int, place: str, schedule: str
) -> None:
    model = pp.Model(layers, loss, sgd)
    batch = BATCHES[0][0].clone(), BATCHES[0][1]
    if len(layers) == 4:
        make_identity(layers[0])
        batch[0][5] = 7.0
    cut = len(layers) // 2
    with (
        launched("thread", model, stages=[cut], schedule=schedule, microbatches=4, on_nan="stop") as pipeline,
        pytest.raises(pp.NonFiniteError) as caught,
    ):
        pipeline.step(batch)
    assert place in str(caught.value)
    assert caught.value.microbatch == microbatch


def test_fp16s_scale_backs_off_for_large_gradients_and_only_a_loss_that_is_not_finite_is_skipped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = model_with_everything(loss=lambda output, target: squared_error(output, target) * 50.0)
    with launched("thread", model, stages=2, microbatches=4, precision="fp16", on_nan="skip") as pipeline:
        results = [pipeline.step(batch) for batch in (*BATCHES[:2], poisoned(BATCHES[2], float("nan")))]
        assert all(bool(value.isfinite().all()) for value in pipeline.state_dict().values())
    assert [bool(result.why_skipped) for result in results] == [False, False, True]
    assert results[0].skipped  # the first scale is too large
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0] == (
        "step 2: the loss is nan, first in micro-batch 2, stage 0 (stages/0): the output of layer 0.Linear; the update "
        "is left out on all stages"
    )


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_an_asynchronous_pipeline_stops_before_the_update_and_names_the_layer(
    schedule: str, recompute: str, tmp_path: Path
) -> None:
    model = pp.Model([nn.Linear(D, D), nn.Dropout(0.5), nn.Tanh(), nn.Linear(D, D)], squared_error, sgd)
    bad = poisoned(BATCHES[1], float("nan"))
    options = {"stages": [2], "schedule": schedule, "microbatches": 4, "on_nan": "stop", "recompute": recompute}
    with launched("thread", model, [BATCHES[0], bad, BATCHES[2]], **options) as pipeline:
        pipeline.save(tmp_path)
        with pytest.raises(pp.NonFiniteError) as caught:
            list(pipeline.steps())
        assert (
            "step 1: an output is not finite, first in micro-batch 2, stage 0 (stages/0): the output of layer 0.Linear"
            "; earlier updates have been made: load() a checkpoint to go on"
        ) in str(caught.value)
        assert (caught.value.step, caught.value.stage, caught.value.layer) == (1, 0, "0.Linear")
        pipeline.load(tmp_path)
        assert all(bool(value.isfinite().all()) for value in pipeline.state_dict().values())
        assert next(pipeline.steps(1)).step == 0


@pytest.mark.parametrize(
    ("layers", "loss", "microbatch", "place"),
    [
        pytest.param(
            [nn.Linear(D, D), ZeroWhere(), Root(), nn.Linear(D, D), nn.Linear(D, D)],
            squared_error,
            0,
            "the gradients are not finite, first in micro-batch 0, stage 0 (stages/0): the gradient of 'weight' of "
            "layer 0.Linear; earlier",
            id="backward of a layer",
        ),
        pytest.param(
            [nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)],
            infinite_slope,
            0,
            "the gradients are not finite, first in micro-batch 0, stage 1 (stages/1): the gradient of 'weight' of "
            "layer 2.Linear; earlier",
            id="backward of the loss",
        ),
        pytest.param(
            [nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)],
            loss_of_infinity,
            0,
            ", first in micro-batch 0, stage 1 (stages/1): the output of the loss function; ",
            id="loss",
        ),
    ],
)
def test_an_asynchronous_pipeline_looks_at_the_loss_and_at_gradients(
    layers: list[nn.Module], loss: Any, microbatch: int, place: str
) -> None:
    """It looks at parameters' gradients only, and names the last layer before the trouble that has some."""
    batch = BATCHES[0][0].clone(), BATCHES[0][1]
    if len(layers) == 5:
        make_identity(layers[0])
        batch[0][0] = 7.0
    with (
        launched("thread", pp.Model(layers, loss, sgd), stages=[2], schedule="pipedream", on_nan="stop") as pipeline,
        pytest.raises(pp.NonFiniteError) as caught,
    ):
        pipeline.step(batch)
    assert place in str(caught.value)
    assert caught.value.microbatch == microbatch


def test_sparse_gradients_are_looked_at_too() -> None:
    class Tokens(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x[..., 0] > 0).long()

    def error(output: Tensor, target: Tensor) -> Tensor:
        # The slope at 0 is infinite, for one of the samples.
        return infinite_slope(output, target) if target.max() > 1e6 else squared_error(output, target)

    layers = [Tokens(), nn.Embedding(2, D, sparse=True)]
    model = pp.Model(layers, error, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with launched("thread", model, stages=1, microbatches=4, on_nan="stop") as pipeline:
        assert not pipeline.step(BATCHES[0]).skipped
        bad = BATCHES[1][1].clone()
        bad[7] = 1e9
        text = (
            r"the gradients are not finite, first in micro-batch 3, stage 0 .*: the gradient of the input of the loss"
        )
        with pytest.raises(pp.NonFiniteError, match=text):
            pipeline.step((BATCHES[1][0], bad))


def test_by_default_nobody_minds() -> None:
    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], squared_error, sgd, lr_scheduler=halve_every_two_steps)
    with launched("thread", model, stages=2, microbatches=2) as pipeline:
        result = pipeline.step(poisoned(BATCHES[0], float("nan")))
        assert (result.loss == result.loss, result.skipped, result.why_skipped) == (False, False, "")
        assert bool(pipeline.state_dict()["1.weight"].isnan().any())


def test_unknown_choices_are_refused() -> None:
    refuses(pp.PipelineError, "on_nan='halt'.*'ignore', 'stop' or 'skip'", on_nan="halt")
    refuses(pp.PipelineError, "on_nan='skip'.* asynchronous", on_nan="skip", schedule="pipedream")


class Grows(nn.Module):
    """A layer that grows its numbers in place; the second time it is too much."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(1e25)


@pytest.mark.parametrize(
    "options",
    [{"stages": 1}, {"stages": 2}, {"stages": 1, "replicas": 2}, {"stages": 1, "schedule": "pipedream"}],
    ids=str,
)
@pytest.mark.parametrize("fed", [True, False])
def test_the_layer_is_named_though_one_before_it_has_written_to_the_batch(options: dict[str, Any], fed: bool) -> None:
    # The step (asynchronous: its layers) was run again on what the first run had left of its input, too large from the
    # first layer on.
    model = pp.Model([Grows(), Grows(), nn.Linear(D, D)], squared_error, sgd)
    batches = [(torch.ones(4, D), torch.zeros(4, D))]
    feeder = batches if fed else None
    with (
        launched("thread", model, feeder, microbatches=2, on_nan="stop", **options) as pipeline,
        pytest.raises(pp.NonFiniteError, match=r"first in micro-batch 0, .* the output of layer 1\.Grows"),
    ):
        pipeline.step(None if fed else batches[0])
