"""Replicas that divide optimizer state, gradients and parameters (zero=1, 2, 3) train to the bits of a plain loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.errors import NotSupported, PipelineError
from tests.pipeline.plain_loop import (
    D,
    PlainLoop,
    adam,
    assert_same_state,
    launched,
    layers_with_everything,
    model_with_everything,
    random_batches,
    squared_error,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

# 10 in 6 makes five micro-batches; 3 makes three, 1 one: fewer than there are replicas.
BATCHES = random_batches([10, 3, 12, 1])


def without_batch_norm(**options: Any) -> pp.Model:
    layers = [layer for layer in layers_with_everything() if layer.name != "BatchNorm1d"]
    return model_with_everything(layers=layers, **options)


def check_steps_and_checkpoint(mode: str, folder: Path, **options: Any) -> None:
    """Train, evaluate, save and load with these options, beside a plain loop."""
    model, replicas = without_batch_norm(), options["replicas"]
    by_layer = [replicas[0]] * 4 + [replicas[-1]] * 4
    clip, precision = options.get("clip_grad_norm"), options.get("precision", "fp32")
    plain = PlainLoop(model, 6, clip, precision, replicas=by_layer)
    with launched(mode, model, BATCHES, microbatches=6, **options) as pipeline:
        for batch in BATCHES[:2]:
            pipeline.step()
            plain.step(batch)
        assert pipeline.evaluate([BATCHES[2]]).loss == plain.evaluate(BATCHES[2])
        pipeline.save(folder)
        pipeline.step()
        pipeline.load(folder)
        for batch in BATCHES[2:]:
            pipeline.step()
            plain.step(batch)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("zero", "stages", "options"),
    [
        (1, [4], {"replicas": (2, 3), "clip_grad_norm": 0.1}),
        (1, [], {"replicas": (4,), "precision": "fp16", "schedule": "gpipe"}),
    ],
)
def test_replicas_that_divide_state_train_to_the_same_bits(
    zero: int, stages: list[int], options: dict[str, Any], tmp_path: Path
) -> None:
    check_steps_and_checkpoint("thread", tmp_path, zero=zero, stages=stages, **options)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("zero", [0, 1])
def test_every_number_of_replicas_trains_to_the_same_bits(mode: str, replicas: int, zero: int, tmp_path: Path) -> None:
    check_steps_and_checkpoint(mode, tmp_path, zero=zero, stages=1, replicas=(replicas,))


def test_a_checkpoint_of_divided_state_is_loaded_by_one_process(tmp_path: Path) -> None:
    model = without_batch_norm()
    with launched("thread", model, BATCHES, stages=2, replicas=2, microbatches=4, zero=1) as pipeline:
        pipeline.step()
        pipeline.save(tmp_path)
        pipeline.step()
        trained = pipeline.state_dict()
    with launched("thread", model, BATCHES, stages=1, replicas=2, microbatches=4) as pipeline:
        pipeline.load(tmp_path)
        pipeline.step()
        assert_same_state(pipeline.state_dict(), trained)


class _Explodes(nn.Module):
    """Multiplies by a number that no half has, in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (float("inf") if self.calls == 2 else 1.0)


@pytest.mark.parametrize("zero", [0, 1])
def test_an_infinite_gradient_of_one_replica_skips_the_step_on_all(zero: int) -> None:
    model = pp.Model([nn.Linear(D, D), pp.Layer(_Explodes), nn.Linear(D, D)], squared_error, adam)
    options = {"stages": 1, "replicas": 2, "microbatches": 2, "precision": "fp16", "zero": zero}
    with launched("thread", model, random_batches([8, 8, 8]), **options) as pipeline:
        pipeline.step()
        before = pipeline.fingerprint()
        skipped = pipeline.step()
        assert skipped.skipped and pipeline.fingerprint() == before
        after = pipeline.step()
        assert not after.skipped and after.loss_scale == skipped.loss_scale / 2
        assert pipeline.fingerprint() != before


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"zero": 4}, PipelineError, "zero=4"),
        ({"zero": 1, "schedule": "pipedream"}, NotSupported, "asynchronous"),
        ({"offload": "disk"}, PipelineError, "disk"),
        ({"offload": "cpu"}, NotSupported, "offload"),
    ],
)
def test_what_cannot_be_divided_is_refused_at_setup(options: dict[str, Any], error: type, word: str) -> None:
    with pytest.raises(error, match=word):
        pp.add_pipeline(lp.Program("zero"), without_batch_norm(), stages=2, replicas=2, microbatches=4, **options)


def test_an_optimizer_that_needs_whole_parameters_is_refused_by_name() -> None:
    model = without_batch_norm(optimizer=torch.optim.Adafactor, lr_scheduler=None)
    program = lp.Program("zero")
    pp.add_pipeline(program, model, stages=1, replicas=2, microbatches=4, zero=1)
    with pytest.raises(lp.NodeError, match="Adafactor") as failed:
        lp.launch(program, "thread").wait(timeout=60)
    assert failed.value.type_name == "NotSupported"
