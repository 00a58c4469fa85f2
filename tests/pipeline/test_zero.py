"""Replicas that divide optimizer state, gradients and parameters (zero=1, 2, 3) train to the bits of a plain loop."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.collectives.inproc import InprocBackend
from lp_pipe.errors import NotSupported, PipelineError
from lp_pipe.pipeline.worker import worker
from tests.pipeline.plain_loop import (
    D,
    PlainLoop,
    adam,
    assert_same_state,
    launched,
    random_batches,
    squared_error,
    without_batch_norm,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

# 10 in 6 makes five micro-batches; 3 makes three, 1 one: fewer than there are replicas.
BATCHES = random_batches([10, 3, 12, 1])


def check_steps_and_checkpoint(
    mode: str, folder: Path, device: str = "cpu", kind: type[PlainLoop] = PlainLoop, **options: Any
) -> None:
    """Train, evaluate, save and load with these options, beside a plain loop of that kind."""
    model, replicas = without_batch_norm(), options["replicas"]
    by_layer = [replicas[0]] * 4 + [replicas[-1]] * 4
    clip, precision = options.get("clip_grad_norm"), options.get("precision", "fp32")
    plain = kind(model, 6, clip, precision, replicas=by_layer, device=device)
    with launched(mode, model, BATCHES, microbatches=6, device=device, **options) as pipeline:
        for batch in BATCHES[:2]:
            pipeline.step()
            plain.step(batch)
            assert_same_state(pipeline.state_dict(), plain.state_dict())
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
        (2, [], {"replicas": (3,), "clip_grad_norm": 0.1}),
        (3, [], {"replicas": (4,), "precision": "fp16", "clip_grad_norm": 0.1, "schedule": "gpipe"}),
        (3, [], {"replicas": (2,), "recompute": ("every", 3)}),
    ],
)
def test_replicas_that_divide_state_train_to_the_same_bits(
    zero: int, stages: list[int], options: dict[str, Any], tmp_path: Path
) -> None:
    check_steps_and_checkpoint("thread", tmp_path, zero=zero, stages=stages, **options)


@pytest.mark.parametrize(
    ("zero", "stages", "options"),
    [
        (0, [4], {"replicas": (1, 2), "clip_grad_norm": 0.1}),
        pytest.param(1, [4], {"replicas": (2, 1)}, marks=pytest.mark.slow),
        pytest.param(2, [], {"replicas": (2,), "clip_grad_norm": 0.1}, marks=pytest.mark.slow),
        (3, [], {"replicas": (2,), "precision": "fp16"}),
    ],
)
def test_stages_that_offload_train_to_the_bits_of_an_update_on_the_cpu(
    zero: int, stages: list[int], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU is the stand-in for a GPU, whose tensors would be copied."""
    monkeypatch.setattr(worker, "has_own_memory", lambda device: True)
    check_steps_and_checkpoint("thread", tmp_path, zero=zero, stages=stages, offload="cpu", **options)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_number_of_replicas_trains_to_the_same_bits(mode: str, replicas: int, zero: int, tmp_path: Path) -> None:
    check_steps_and_checkpoint(mode, tmp_path, zero=zero, stages=1, replicas=(replicas,))


def test_checkpoints_of_divided_state_are_loaded_by_any_others(tmp_path: Path) -> None:
    model, trained = without_batch_norm(), []
    ways: list[dict[str, Any]] = [{"stages": 2, "zero": 1}, {"stages": 1, "zero": 3}, {"stages": 1}]
    for number, options in enumerate(ways):
        with launched("thread", model, BATCHES, replicas=2, microbatches=4, **options) as pipeline:
            if number:
                pipeline.load(tmp_path / str(number - 1))
            pipeline.step()
            pipeline.save(tmp_path / str(number))
            trained.append(pipeline.fingerprint())
    plain = PlainLoop(model, 4, replicas=[2] * 8)
    with launched("thread", model, BATCHES, stages=1, replicas=2, microbatches=4) as pipeline:
        for fingerprint, batch in zip(trained, BATCHES, strict=False):
            plain.step(batch)
            pipeline.load_state_dict(plain.state_dict())
            assert pipeline.fingerprint() == fingerprint


def test_parameters_in_shards_are_replaced_by_a_state_dict() -> None:
    model = without_batch_norm()
    plain = PlainLoop(model, 4)
    plain.step(BATCHES[0])
    with launched("thread", model, stages=1, replicas=3, microbatches=4, zero=3) as pipeline:
        pipeline.load_state_dict(plain.state_dict())
        assert_same_state(pipeline.state_dict(), plain.state_dict())
        assert torch.equal(pipeline.forward(BATCHES[0][0]), plain.output(BATCHES[0][0]))


class _Explodes(nn.Module):
    """Multiplies by a number that no half has, in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (float("inf") if self.calls == 2 else 1.0)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
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
        ({"zero": 3}, NotSupported, "stages"),
        ({"zero": 2, "stages": 1, "schedule": "zb_h1"}, NotSupported, "splits"),
        ({"offload": "disk"}, PipelineError, "disk"),
        ({"offload": "cpu", "schedule": "pipedream"}, NotSupported, "offload"),
    ],
)
def test_what_cannot_be_divided_is_refused_at_setup(options: dict[str, Any], error: type, word: str) -> None:
    with pytest.raises(error, match=word):
        pp.add_pipeline(
            lp.Program("zero"), without_batch_norm(), **{"stages": 2, "replicas": 2, "microbatches": 4, **options}
        )


class _KeepsCount(nn.Linear):
    """Writes to its own parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.bias.add_(1.0)
        return super().forward(x)


def test_a_forward_that_writes_to_a_parameter_in_shards_is_refused_by_name() -> None:
    model = pp.Model([pp.Layer(_KeepsCount, D, D), nn.Linear(D, D)], squared_error, adam)
    with (
        launched("thread", model, random_batches([8]), stages=1, replicas=2, microbatches=2, zero=3) as pipeline,
        pytest.raises(NotSupported, match=r"0\.bias"),
    ):
        pipeline.step()


def test_sixteen_microbatches_make_one_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("all_reduce", "reduce_scatter"):
        original = getattr(InprocBackend, name)

        def counted(backend: Any, *args: Any, _original: Any = original, _name: str = name, **options: Any) -> None:
            calls.append(_name)
            _original(backend, *args, **options)

        monkeypatch.setattr(InprocBackend, name, counted)
    for zero, expected in [(0, ["all_reduce"]), (1, ["all_reduce"]), (2, ["reduce_scatter"]), (3, ["reduce_scatter"])]:
        model = pp.Model([pp.Layer(nn.Linear, D, D)], squared_error, adam)
        with launched("thread", model, random_batches([32]), stages=1, replicas=2, microbatches=32, zero=zero) as one:
            calls.clear()
            one.step()
        assert calls == expected * 2  # by each replica


@pytest.mark.parametrize(
    ("optimizer", "word"),
    [(torch.optim.Adafactor, "Adafactor"), (partial(torch.optim.Adam, fused=True), "fused")],
)
def test_an_optimizer_that_depends_on_the_shards_is_refused_by_name(optimizer: Any, word: str) -> None:
    model = without_batch_norm(optimizer=optimizer, lr_scheduler=None)
    program = lp.Program("zero")
    pp.add_pipeline(program, model, stages=1, replicas=2, microbatches=4, zero=1)
    with pytest.raises(lp.NodeError, match=word) as failed:
        lp.launch(program, "thread").wait(timeout=60)
    assert failed.value.type_name == "NotSupported"
