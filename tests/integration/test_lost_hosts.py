"""A host with stages is lost in the middle of a training, which ends on the others, with the same bits."""

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.errors import LaunchError
from lp_pipe.launch.engines.base import Invitation, StartedAgent
from lp_pipe.launch.engines.local import LocalEngine
from tests.integration.small import Feeder, squared_error
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def without_torch() -> None:
    """Let templates preload torch: otherwise each stage needs a second to load it."""


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


def train(pipeline: pp.PipelineClient, fingerprint: Path) -> None:
    checkpoints = Checkpoints({"pipeline": pipeline})
    for result in checkpoints.steps(pipeline, 8, save_every=3):
        assert result.step < 8
    fingerprint.write_text(pipeline.fingerprint())
    lp.stop()


def train_slowly(pipeline: pp.PipelineClient, folder: Path, num_hosts: int) -> None:
    """Train on two hosts and wait for the third: until it is there, and then until it is to be used.

    Its steps take a second then: the launcher looks more often whether there are more hosts, and then for a checkpoint.
    """
    for result in Checkpoints({"pipeline": pipeline}).steps(pipeline, 10, save_every=2):
        with (folder / "steps").open("a") as file:
            file.write(f"{result.step} on {num_hosts}\n")
        if num_hosts == 2 and result.step == 4:
            until((folder / "three again").exists)
        if num_hosts == 2 and result.step > 4:
            lp.wait_for_stop(30 if result.step == 8 else 1)
    (folder / "fingerprint").write_text(pipeline.fingerprint())
    lp.stop()


def program_for(num_hosts: int, folder: Path, calls: int) -> lp.Program:
    """Return a program with a stage for each host, on one of which it dies."""
    layers: list[Any] = [pp.Layer(nn.Linear, 6, 8), pp.Layer(nn.Dropout, 0.5), pp.Layer(nn.Linear, 8, 8)]
    layers += [pp.Layer(LosesItsHost, folder / "lost", calls), pp.Layer(nn.Linear, 8, 2)]
    model = pp.Model(layers, squared_error, torch.optim.Adam)
    program = lp.Program("elastic")
    feeder = program.add_node(lp.CourierNode(Feeder), label="feeder")
    pipeline = pp.add_pipeline(program, model, stages=num_hosts, microbatches=2, inputs=feeder)
    program.add_node(lp.PyNode(train_slowly, pipeline, folder, num_hosts), label="trainer")
    return program


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


class RepairedLater(LocalEngine):
    """A lost host can be started again only from a certain moment on."""

    def __init__(self, hosts: str) -> None:
        super().__init__(hosts)
        self.is_repaired = threading.Event()
        self._started: set[str] = set()

    def start_again(self, invitation: Invitation, name: str) -> StartedAgent:
        if name in self._started and not self.is_repaired.is_set():
            raise LaunchError(f"{name} is being repaired")
        self._started.add(name)
        return super().start_again(invitation, name)


@pytest.mark.slow
def test_an_elastic_training_goes_on_with_two_stages_and_then_three_to_the_same_bits(tmp_path: Path) -> None:
    whole, elastic = tmp_path / "whole", tmp_path / "elastic"
    for folder in (whole, elastic):
        folder.mkdir()
    lp.launch(program_for(3, whole, calls=0), "thread", run_dir=whole).wait(60)
    engine = RepairedLater("3")
    run = lp.launch_elastic(lambda count: program_for(count, elastic, calls=9), "2:3", engine=engine, run_dir=elastic)
    until(lambda: run.num_hosts == 2, 60)
    engine.is_repaired.set()
    until(lambda: len(run._hosts.up()) == 3)
    (elastic / "three again").touch()
    run.wait(90)
    hosts = [line.split()[-1] for line in (elastic / "steps").read_text().splitlines()]
    assert [count for count, _ in itertools.groupby(hosts)] == ["3", "2", "3"]
    assert (elastic / "fingerprint").read_text() == (whole / "fingerprint").read_text()
