"""The memory of a training is estimated before its launch, as its stages then measure it."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.cli.main import main
from lp_pipe.errors import NotSupported
from lp_pipe.measuring.memory_estimate import program_memory

MICROBATCH = torch.randn(16, 32), torch.randn(16, 4)
BATCH = torch.randn(128, 32), torch.randn(128, 4)


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.BatchNorm1d(width))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-3)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for name, one in parameters if "bias" not in name], 0.1, momentum=0.9)


def model(optimizer: Any = adam) -> pp.Model:
    layers = [pp.Layer(nn.Linear, 32, 64), *(pp.Layer(block, 64) for _ in range(5)), pp.Layer(nn.Linear, 64, 4)]
    return pp.Model(layers, F.mse_loss, optimizer)


def without_batch_norm() -> pp.Model:
    """Return a model whose layers zero=3 can gather one by one."""
    layers = [pp.Layer(nn.Linear, 32, 64), *(pp.Layer(nn.Linear, 64, 64) for _ in range(5)), pp.Layer(nn.Linear, 64, 4)]
    return pp.Model(layers, F.mse_loss, adam)


def tied() -> pp.Model:
    layers = [nn.Linear(32, 8, bias=False), nn.Linear(8, 32), nn.Linear(32, 8, bias=False), nn.Linear(8, 4)]
    layers[2].weight = layers[0].weight
    layers[1].weight.requires_grad_(False)
    return pp.Model(layers, F.mse_loss, adam)


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (model(), {"stages": 3}),
        (model(momentum), {"stages": 2, "replicas": 2, "schedule": "gpipe"}),
        (model(), {"stages": 2, "replicas": 2, "zero": 1}),
        (without_batch_norm(), {"stages": 1, "replicas": 2, "zero": 2}),
        (without_batch_norm(), {"stages": 1, "replicas": 4, "zero": 3}),
        (model(), {"stages": 2, "precision": "bf16"}),
        (model(), {"stages": 2, "recompute": ("every", 2)}),
        (model(), {"stages": 2, "schedule": "interleaved"}),
        (tied(), {"stages": [2]}),
    ],
    ids=["1f1b", "replicas", "zero 1", "zero 2", "zero 3", "bf16", "recompute", "interleaved", "tied"],
)
def test_stages_measure_what_was_estimated(launched: Any, made: pp.Model, options: dict[str, Any]) -> None:
    estimate = pp.memory(made, sample=MICROBATCH, **options)
    program = lp.Program("pipeline")
    pipeline = pp.add_pipeline(program, made, **options)
    launched(program)
    client = pipeline.dereference()
    client.step(BATCH)
    measured = client.profile_memory(1, BATCH)
    assert len(measured) == sum(worker.processes for worker in estimate.workers)
    for found in measured:
        expected = estimate.workers[found.worker]
        assert expected.stages == found.stages
        for kind in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes", "activation_bytes"):
            # Of activations, what the first layer behind a cut keeps is known only with the layer before the cut. Of
            # buffers, stages do not measure their copy of a tied weight.
            rel, least = (0.2, 4096) if kind == "activation_bytes" else (0.05, 1024 if kind == "buffer_bytes" else 0)
            if kind == "activation_bytes" and options.get("zero") == 3:
                continue  # stages also count the layers there that are gathered at the time
            measured_bytes = getattr(found, kind)
            assert getattr(expected, kind) == pytest.approx(measured_bytes, rel=rel, abs=least), (found.worker, kind)


@pytest.mark.parametrize(("zero", "factor"), [(0, 16), (1, 8 + 8 / 4), (2, 4 + 12 / 4), (3, 16 / 4)])
def test_adam_needs_these_bytes_for_each_parameter(zero: int, factor: float) -> None:
    wide = pp.Model([pp.Layer(nn.Linear, 1000, 1000)], F.mse_loss, adam)
    (worker,) = pp.memory(wide, 4, zero).workers
    training = worker.parameter_bytes + worker.gradient_bytes + worker.optimizer_bytes
    assert training / 1_001_000 == pytest.approx(factor, rel=0.001)
    assert worker.activation_bytes is None


def test_a_model_that_fits_nowhere_is_estimated_in_little_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    huge = pp.Model([pp.Layer(nn.Linear, 200_000, 200_000) for _ in range(8)], F.mse_loss, adam)
    estimate = pp.memory(huge, stages=4, limit=80 << 30)
    assert estimate.largest_bytes == pytest.approx(2 * 16 * 200_000 * 200_001)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
    (advice,) = estimate.advice
    assert "1192" in advice and "stages=8" in advice  # GiB


def test_advice_names_each_change_that_is_enough() -> None:
    made, options = model(), {"schedule": "gpipe", "sample": MICROBATCH}
    needed = pp.memory(made, 2, 0, **options).largest_bytes
    assert pp.memory(made, 2, 0, limit=needed, **options).advice == ()
    for part, expected in [
        (0.9, ["zero=1", "stages=2", "recompute"]),
        (0.7, ["zero=2", "stages=2"]),
    ]:
        assert changes(pp.memory(made, 2, 0, limit=int(part * needed), **options)) == expected
    needed = pp.memory(made, stages=2, sample=MICROBATCH).largest_bytes
    assert "microbatches=16" in changes(pp.memory(made, stages=2, sample=MICROBATCH, limit=int(0.97 * needed)))
    (advice,) = pp.memory(made, 2, 0, limit=1000, **options).advice
    assert all(f"{name}=" in advice for name in ("zero", "stages", "recompute", "microbatches"))


def changes(estimate: pp.MemoryEstimate) -> list[str]:
    (advice,) = estimate.advice
    return [part.split(" needs")[0].replace('="full"', "") for part in advice.split(": ", 2)[2].split(", or ")]


class Looking(torch.optim.SGD):
    """An optimizer that looks at numbers."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad.abs().max().item() > 1:
                    self.state[parameter]["large"] = torch.ones(())


def test_what_is_assumed_is_said() -> None:
    estimate = pp.memory(model(lambda named: Looking(named, 0.1)), limit=1)
    assert [note.partition(":")[0] for note in estimate.notes] == ["optimizer", "activations"]
    assert estimate.workers[0].optimizer_bytes == 2 * estimate.workers[0].parameter_bytes


def test_impossible_options_are_refused() -> None:
    with pytest.raises(NotSupported, match="zero=2"):
        pp.memory(model(), 2, 2, stages=2)
    with pytest.raises(pp.PipelineError, match="zero=4"):
        pp.memory(model(), 2, 4)
    with pytest.raises(pp.PipelineError, match="2 layers, and the model 7"):
        layers = tuple(pp.LayerProfile(name, 1, 1, 1, 1) for name in "ab")
        pp.memory(model(), profile=pp.Profile(layers))


PROGRAM = """
import torch, lp_pipe as lp, lp_pipe.pipeline as pp
from torch import nn
program = lp.Program("train")
layers = [nn.Linear(1000, 1000) for _ in range(4)]
model = pp.Model(layers, nn.functional.mse_loss, lambda named: torch.optim.Adam(named))
pp.add_pipeline(program, model, stages=2, resources=lp.Resources(memory=20_000_000))
"""


def test_a_dry_run_says_that_the_memory_is_too_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    assert main(["launch", str(tmp_path / "train.py"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "memory of stages" in said and "does not fit: worker 0 needs" in said
    assert "stages=4" in said and "zero=1, replicas=2" not in said  # that would need 20.02 MB


@pytest.mark.parametrize(("device", "optimizer_bytes"), [("cuda", 0), ("cpu", 2 * 4 * 12 + 2 * 4)])
def test_what_a_gpu_offloads_is_not_in_its_memory(device: str, optimizer_bytes: int) -> None:
    program, model = lp.Program("offload"), pp.Model([nn.Linear(3, 3)], F.mse_loss, torch.optim.Adam)
    pp.add_pipeline(program, model, stages=1, device=device, offload="cpu")
    estimate = program_memory(program, "thread")["stages"]
    assert estimate.workers[0].optimizer_bytes == optimizer_bytes
    assert any("offload" in note for note in estimate.notes) == (device == "cuda")
