"""A host with stages is lost in the middle of a training, which ends on the others, with the same bits."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.checkpoint import Checkpoints

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def without_torch() -> None:
    """In place of tests/conftest.py's: loading torch in each stage by itself would take a second of each."""


class Feeder:
    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)


class LosesItsHost(nn.Module):
    """Kills its agent in a forward of training, once; at its death it leaves a file."""

    def __init__(self, mark: Path, calls: int) -> None:
        super().__init__()
        self._mark, self._calls_left = mark, calls

    def forward(self, value: Tensor) -> Tensor:
        self._calls_left -= self.training
        if self._calls_left == 0 and not self._mark.exists():
            self._mark.write_text(str(os.getpid()))
            os.kill(psutil.Process().parent().ppid(), signal.SIGKILL)  # above the template
        return value


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def train(pipeline: pp.PipelineClient, fingerprint: Path) -> None:
    checkpoints = Checkpoints({"pipeline": pipeline})
    for result in checkpoints.steps(pipeline, 8, save_every=3):
        assert result.step < 8
    fingerprint.write_text(pipeline.fingerprint())
    lp.stop()


def trained(mode: str, run_dir: Path, *, calls: int, **options: Any) -> str:
    """The fingerprint after 8 steps."""
    run_dir.mkdir()
    layers: list[Any] = [pp.Layer(nn.Linear, 6, 8), pp.Layer(nn.Dropout, 0.5)]
    layers += [pp.Layer(LosesItsHost, run_dir / "lost", calls), pp.Layer(nn.Linear, 8, 2)]
    model = pp.Model(layers, squared_error, torch.optim.Adam)
    program = lp.Program("lost")
    feeder = program.add_node(lp.CourierNode(Feeder), label="feeder")
    pipeline = pp.add_pipeline(program, model, stages=[2], microbatches=2, inputs=feeder, on_failure="restart")
    with program.group("trainer", on_failure="restart"):
        program.add_node(lp.PyNode(train, pipeline, run_dir / "fingerprint"))
    lp.launch(program, mode, run_dir=run_dir, **options).wait(90)
    return (run_dir / "fingerprint").read_text()


@pytest.mark.slow
def test_a_training_whose_host_is_killed_goes_on_elsewhere_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    undisturbed = trained("thread", tmp_path / "whole", calls=0)
    assert trained("multi_host", tmp_path / "killed", calls=9, hosts="2") == undisturbed
    assert (tmp_path / "killed" / "lost").exists()
