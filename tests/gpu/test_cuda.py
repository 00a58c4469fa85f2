"""Stages on GPUs train to the bits of the plain loop on the same GPU. `make gpu-check` runs this; it needs one GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.errors import PipelineError
from lp_pipe.launch.processes import template
from tests.pipeline.layers.test_splitting import MakesTensors
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

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("deterministic"),
]

BATCHES = random_batches([10, 3, 2, 12])
STAGES: dict[str, Any] = {"stages": 2, "device": "cuda:0", "microbatches": 4}  # both on one GPU


@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zbv", "dualpipev"])
def test_every_schedule_trains_to_the_same_bits(mode: str, schedule: str) -> None:
    model = model_with_everything()
    plain = PlainLoop(model, 4, 0.1, device="cuda:0")
    with launched(mode, model, BATCHES, schedule=schedule, clip_grad_norm=0.1, **STAGES) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())
        assert pipeline.evaluate([BATCHES[0]]).loss == plain.evaluate(BATCHES[0])
        assert torch.equal(pipeline.forward(BATCHES[0][0]), plain.output(BATCHES[0][0]).cpu())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zbv", "dualpipev"])
def test_every_schedule_over_nccl_trains_to_the_same_bits(schedule: str) -> None:
    model = model_with_everything()
    plain = PlainLoop(model, 4, 0.1, device="cuda:0")
    options: Any = {"schedule": schedule, "clip_grad_norm": 0.1, "channel": "nccl", **STAGES}
    with launched("process", model, BATCHES, **options) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.parametrize("channel", ["shm", "grpc", "gloo"])
def test_other_kinds_of_channel_train_to_the_same_bits(channel: str) -> None:
    """Train through CUDA IPC, and through the host."""
    model = model_with_everything()
    plain = PlainLoop(model, 4, 0.1, device="cuda:0")
    with launched("process", model, BATCHES, clip_grad_norm=0.1, channel=channel, **STAGES) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.parametrize("channel", ["auto", "nccl"])
def test_a_stage_on_the_gpu_and_one_on_the_cpu(channel: str) -> None:
    model = pp.Model([nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)], squared_error, adam)
    options: Any = {"stages": 2, "microbatches": 4, "device": ["cuda:0", "cpu"], "channel": channel}
    if channel == "nccl":
        with pytest.raises(PipelineError, match="NCCL carries tensors of GPUs only"):
            pp.add_pipeline(lp.Program("train"), model, **options)
        return
    with launched("process", model, BATCHES, **options) as pipeline:
        assert len([result.loss for result in pipeline.steps()]) == len(BATCHES)


@pytest.mark.parametrize("recompute", ["none", "full", ("every", 2)])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_recompute_and_precision(precision: str, recompute: Any) -> None:
    model = model_with_everything()
    plain = PlainLoop(model, 4, precision=precision, device="cuda:0")
    with launched("process", model, BATCHES, precision=precision, recompute=recompute, **STAGES) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.parametrize("channel", ["auto", "nccl"])
def test_replicas_on_one_gpu(channel: str) -> None:
    layers = [layer for layer in layers_with_everything() if layer.name != "BatchNorm1d"]
    model = model_with_everything(layers=layers)
    plain = PlainLoop(model, 4, replicas=[2] * 8, device="cuda:0")
    with launched("process", model, BATCHES, replicas=2, channel=channel, **STAGES) as pipeline:
        list(pipeline.steps())
        plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_a_checkpoint_goes_from_the_gpu_to_the_host_and_back(tmp_path: Path) -> None:
    model = pp.Model([nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)], squared_error, adam)
    with launched("thread", model, BATCHES, **STAGES) as pipeline:
        pipeline.step()
        pipeline.save(tmp_path)
        expected = pipeline.state_dict()
    for device in ("cpu", "cuda"):
        with launched("thread", model, BATCHES, stages=2, microbatches=4, device=device) as pipeline:
            pipeline.load(tmp_path)
            assert_same_state(pipeline.state_dict(), expected)
            pipeline.step()


def fused_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, fused=True)


def test_a_fused_optimizer_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    model = model_with_everything(optimizer=fused_adam)
    plain = PlainLoop(model, 4, device="cuda:0")
    expected = plain.steps(BATCHES)
    with launched("thread", model, BATCHES, **STAGES) as pipeline:
        list(pipeline.steps(2))
        pipeline.save(tmp_path)
    with launched("thread", model, BATCHES, **STAGES) as pipeline:
        pipeline.load(tmp_path)
        assert [result.loss for result in pipeline.steps()] == expected[2:]


def test_mirrors_of_a_stage_on_the_gpu_are_on_the_host_of_its_guard() -> None:
    model = pp.Model([nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)], squared_error, adam)
    options: Any = {"stages": 2, "microbatches": 4, "device": ["cuda:0", "cpu"]}
    with launched("process", model, BATCHES, **options) as pipeline:
        pipeline.step()
        pipeline.mirror()
        expected = [result.loss for result in pipeline.steps()]
        pipeline.go_back(1)
        assert [result.loss for result in pipeline.steps()] == expected


def test_slices_of_a_batch_lie_as_in_the_plain_loop() -> None:
    """Rows of 28 bytes: how dropout draws, and which kernel multiplies, depends on where a slice begins."""
    model = pp.Model([nn.Dropout(0.3), nn.Linear(7, 7)], squared_error, adam)
    batches = random_batches([10, 9], 7)
    plain = PlainLoop(model, 4, device="cuda:0")
    with launched("thread", model, batches, **STAGES) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(batches)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_pieces_of_a_split_module_train_on_the_gpu() -> None:
    module = MakesTensors()
    model = pp.Model(pp.split(module, torch.randn(3, 5, 4), ["second"]), squared_error, adam)
    assert pp.check(model, random_batches([8, 8], 5, 4), **STAGES).equal


def test_check_compares_with_a_plain_loop_on_the_same_gpu() -> None:
    assert pp.check(model_with_everything(), BATCHES[:2], clip_grad_norm=0.1, **STAGES).equal


def test_what_is_sent_to_the_caller_is_on_the_host() -> None:
    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], squared_error, adam)
    with launched("thread", model, **STAGES) as pipeline:
        assert pipeline.forward(BATCHES[0][0]).device.type == "cpu"
        assert {value.device.type for value in pipeline.state_dict().values()} == {"cpu"}


def test_a_gpu_that_is_not_there_is_refused() -> None:
    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], squared_error, adam)
    wanted = f"cuda:{torch.cuda.device_count()}"
    with (
        pytest.raises(Exception, match=r"sees \d+ GPU"),
        launched("thread", model, stages=2, device=wanted) as pipeline,
    ):
        pipeline.step(BATCHES[0])


_ASKS_THE_DRIVER = """
import ctypes, importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())))
"""
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def test_what_templates_import_leaves_the_driver_to_the_processes_that_they_fork() -> None:
    modules = json.dumps(template._with_optimizers(template._WORTH_PRELOADING))
    command = [sys.executable, "-c", _ASKS_THE_DRIVER, modules]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) == _NOT_INITIALIZED
