"""Many features in one program: in every combination and order the bits are the plain loop's."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import PlainLoop, adam, assert_same_state, launched, random_batches, sgd, squared_error
from tests.pipeline.test_exactness import cuts, models

pytestmark = pytest.mark.usefixtures("no_leaks")

SIZES = [10, 3, 2, 12, 1, 7]
BATCHES = random_batches(SIZES)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    return BATCHES[step % len(BATCHES)]


def by_kind(parameters: Any) -> torch.optim.Optimizer:
    """Groups of which a stage may have an empty one."""
    biases = [parameter for _, parameter in parameters if parameter.ndim == 1]
    others = [parameter for _, parameter in parameters if parameter.ndim != 1]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 3e-3}], amsgrad=True)


def warm_then_cosine(optimizer: torch.optim.Optimizer) -> Any:
    schedulers = torch.optim.lr_scheduler
    warm, cosine = schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.CosineAnnealingLR(optimizer, 4)
    return schedulers.SequentialLR(optimizer, [warm, cosine], [2])


def _step(pipeline: pp.PipelineClient, plain: PlainLoop) -> None:
    batch = batch_of(plain.steps_done)
    assert pipeline.step(batch).loss == plain.step(batch)


def _fail(pipeline: pp.PipelineClient, plain: PlainLoop) -> None:
    """Fail in the last micro-batch."""
    x, y = batch_of(plain.steps_done)
    with pytest.raises(lp.RemoteError):
        pipeline.step((x, y[..., :-1]))


def _skip(pipeline: pp.PipelineClient, plain: PlainLoop) -> None:
    pipeline.skip_step()
    assert plain.lr_scheduler is not None
    plain.lr_scheduler.step()
    plain.steps_done += 1


def _evaluate(pipeline: pp.PipelineClient, plain: PlainLoop) -> None:
    pipeline.evaluate(BATCHES[:3])
    assert torch.equal(pipeline.forward(BATCHES[1][0]), plain.output(BATCHES[1][0]))


def _compare(pipeline: pp.PipelineClient, plain: PlainLoop) -> None:
    assert pipeline.learning_rates() == plain.learning_rates()
    assert_same_state(pipeline.state_dict(), plain.state_dict())


DEEDS: list[Callable[[pp.PipelineClient, PlainLoop], None]] = [_step, _fail, _skip, _evaluate, _compare]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    layers=models(),
    deeds=st.lists(st.lists(st.sampled_from([_step, *DEEDS]), min_size=1, max_size=5), min_size=2, max_size=2),
    optimizer=st.sampled_from([sgd, adam, by_kind]),
    precision=st.sampled_from(["fp32", "fp32", "bf16", "fp16"]),
    clip=st.sampled_from([None, 0.05]),
)
def test_whatever_is_done_and_resumed_in_another_cut(
    data: st.DataObject, layers: list[pp.Layer], deeds: list[list[Any]], optimizer: Any, precision: str, clip: float
) -> None:
    assume(precision != "fp16" or not any(layer.factory is nn.RReLU for layer in layers))  # on the CPU torch has none
    model = pp.Model(layers, squared_error, optimizer, lr_scheduler=warm_then_cosine, seed=3)
    plain = PlainLoop(model, 1, clip, precision)
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(deeds):
            options = data.draw(cuts(len(layers)))
            plain.microbatches = options["microbatches"]
            with launched("thread", model, precision=precision, clip_grad_norm=clip, **options) as pipeline:
                if number:
                    pipeline.load(folder)
                for deed in part:
                    deed(pipeline, plain)
                _compare(pipeline, plain)
                if not number:
                    pipeline.save(folder)
