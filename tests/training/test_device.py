"""Layers and loss under autocast, float16 with the loss scale of a real GradScaler: the bits of the plain loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from lp_pipe.training.gradients import LossScale
from tests.pipeline.plain_loop import (
    D,
    PlainLoop,
    assert_same_state,
    launched,
    model_with_everything,
    random_batches,
    squared_error,
)
from tests.pipeline.test_refusals import refuses

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    # torch's, with a GradScaler too, when the very first step is skipped.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)`"),
]

BATCHES = random_batches([8] * 20)


def large_error(output: Tensor, target: Tensor) -> Tensor:
    """Gradients that are infinite in float16 under the first loss scales."""
    return squared_error(output, target) * 50.0


@pytest.mark.parametrize(
    ("precision", "schedule", "recompute"),
    [
        ("bf16", "1f1b", "full"),
        ("fp16", "zb_h1", "none"),
        *(pytest.param("fp16", *rest, marks=pytest.mark.slow) for rest in (("zb_h1", "full"), ("gpipe", "full"))),
    ],
)
def test_twenty_steps_are_those_of_the_plain_loop(precision: str, schedule: str, recompute: str) -> None:
    model = model_with_everything(loss=large_error)
    plain = PlainLoop(model, 4, 0.1, precision)
    options = {"stages": 3, "schedule": schedule, "microbatches": 4, "clip_grad_norm": 0.1}
    skipped = 0
    with launched("thread", model, precision=precision, recompute=recompute, **options) as pipeline:
        assert pipeline.evaluate(BATCHES[:1]).loss == plain.evaluate(BATCHES[0])
        for batch in BATCHES:
            scale = plain.scaler.get_scale()
            result = pipeline.step(batch)
            assert (result.loss, result.loss_scale) == (plain.step(batch), scale)
            assert result.skipped == (plain.scaler.get_scale() < scale)
            skipped += result.skipped
        assert_same_state(pipeline.state_dict(), plain.state_dict())
        assert all(value.dtype != torch.bfloat16 for value in pipeline.state_dict().values())
    assert (0 < skipped < 20) if precision == "fp16" else not skipped


def test_a_checkpoint_and_a_failed_step_keep_the_loss_scale(tmp_path: Path) -> None:
    model = model_with_everything(loss=large_error)
    options: dict[str, Any] = {"microbatches": 4, "precision": "fp16"}
    plain = PlainLoop(model, 4, precision="fp16")
    with launched("thread", model, stages=2, **options) as pipeline:
        plain.steps(BATCHES[:4])
        for batch in BATCHES[:4]:
            pipeline.step(batch)
        pipeline.save(tmp_path)
    with launched("thread", model, stages=1, **options) as pipeline:
        pipeline.load(tmp_path)
        with pytest.raises(RuntimeError):
            pipeline.step((BATCHES[4][0], BATCHES[4][1][:, :1, :3]))
        for batch in BATCHES[4:8]:
            scale = plain.scaler.get_scale()
            assert (pipeline.step(batch).loss_scale, pipeline.current_step()) == (scale, plain.steps_done + 1)
            plain.step(batch)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


class Embeds(nn.Module):
    """A layer with a gradient that names some rows twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, D, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.table((x.detach().abs() * 7).long().sum(2) % 5)
        return x + rows


def test_sparse_gradients_have_a_loss_scale_too() -> None:
    # torch's GradScaler unscales their values; here the step failed with "no kernel for SparseCPU".
    model = pp.Model([nn.Linear(D, D), Embeds(), nn.Linear(D, D)], large_error, lambda ps: torch.optim.SGD(ps, lr=0.01))
    plain = PlainLoop(model, 4, precision="fp16")
    with launched("thread", model, stages=2, microbatches=4, precision="fp16") as pipeline:
        assert [pipeline.step(batch).loss for batch in BATCHES[:6]] == plain.steps(BATCHES[:6])
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_the_scale_grows_and_backs_off_as_torchs() -> None:
    scaler = torch.amp.GradScaler("cpu")
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scale = LossScale()
    for step in range(2010):
        overflowed = step in (3, 4)
        parameter.grad = torch.tensor([float("inf") if overflowed else 1.0])
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        scale = scale.after(overflowed=overflowed)
        assert (scale.factor, scale.good_steps) == (scaler.get_scale(), scaler._get_growth_tracker())


def test_the_check_knows_precisions() -> None:
    assert pp.check(model_with_everything(), BATCHES[:2], stages=2, microbatches=4, precision="bf16").equal


def test_unknown_precisions_are_refused() -> None:
    refuses(pp.PipelineError, "precision='fp8': give one of fp32, bf16, fp16", precision="fp8")
