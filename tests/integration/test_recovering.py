"""Steps with evaluations between them: any killed process starts again, and all go on, to the same bits."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.checkpoint import Checkpoints
from tests.integration.small import Feeder, squared_error

pytestmark = pytest.mark.usefixtures("no_leaks")
STEPS, ROUND = 9, 3


@pytest.fixture
def without_torch() -> None:
    """Let templates preload torch: otherwise each stage needs a second to load it."""


class Deaths:
    """Kills a process at each of these places, once."""

    def __init__(self, folder: Path, places: tuple[str, ...]) -> None:
        self._folder, self._places = folder, places

    def strike(self, place: str, pid: int | None = None) -> None:
        mark = self._folder / place
        if place in self._places and not mark.exists():
            mark.touch()
            os.kill(pid or os.getpid(), signal.SIGKILL)


class TellsPid(nn.Module):
    """A layer that tells the id of its process."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.write_text(str(os.getpid()))

    def forward(self, value: Tensor) -> Tensor:
        return value


class MortalFeeder(Feeder):
    def __init__(self, deaths: Deaths) -> None:
        self._deaths = deaths

    def batch(self, step: int) -> Any:
        if step == 4:
            self._deaths.strike("feeder")
        return super().batch(step)


class Evaluator:
    """Has something of the feeder, and evaluates the pipeline."""

    def __init__(self, pipeline: pp.PipelineClient, feeder: Any, deaths: Deaths) -> None:
        self._pipeline, self._batch, self._deaths = pipeline, feeder.batch(100), deaths

    def evaluate(self, step: int) -> float:
        if step == 6:
            self._deaths.strike("evaluator")
        return float(self._pipeline.evaluate([self._batch]).loss)


def train(pipeline: pp.PipelineClient, evaluator: Any, deaths: Deaths, run_dir: Path) -> None:
    checkpoints = Checkpoints({"pipeline": pipeline})
    pipeline.fingerprint()  # all are up
    deaths.strike("stages at once", int((run_dir / "pid of stages 1").read_text()))
    checkpoints.begin(pipeline)
    is_done = False
    while not is_done:
        with checkpoints.recovering(pipeline):
            for result in pipeline.steps(ROUND):
                if result.step == 7:
                    deaths.strike("trainer")
            step = pipeline.current_step()
            loss = evaluator.evaluate(step)
            for stage, due in (("stages 1", 3), ("stages 0", 6)):
                if step == due:  # no channel is in use now: what notices that it has come back without its weights?
                    deaths.strike(stage, int((run_dir / f"pid of {stage}").read_text()))
            checkpoints.save(step, wait=step == STEPS)
            is_done = step == STEPS
    (run_dir / "result").write_text(f"{loss} {pipeline.fingerprint()}")
    lp.stop()


def trained(mode: str, run_dir: Path, places: tuple[str, ...], stages: int) -> str:
    """The last evaluation, and the fingerprint."""
    run_dir.mkdir()
    deaths = Deaths(run_dir, places)
    ends = [pp.Layer(TellsPid, run_dir / f"pid of stages {stage}") for stage in range(2)]
    layers = [ends[0], pp.Layer(nn.Linear, 6, 8), pp.Layer(nn.Dropout, 0.5), pp.Layer(nn.Linear, 8, 2), ends[1]]
    model = pp.Model(layers, squared_error, torch.optim.Adam)
    program = lp.Program("rounds")
    with program.group("feeder", on_failure="restart"):
        feeder = program.add_node(lp.CourierNode(MortalFeeder, deaths))
    options: dict[str, Any] = {"microbatches": 2, "inputs": feeder, "on_failure": "restart"}
    pipeline = pp.add_pipeline(program, model, stages=stages, **options)
    with program.group("evaluator", on_failure="restart"):
        evaluator = program.add_node(lp.CourierNode(Evaluator, pipeline, feeder, deaths))
    with program.group("trainer", on_failure="restart"):
        program.add_node(lp.PyNode(train, pipeline, evaluator, deaths, run_dir))
    run = lp.launch(program, mode, run_dir=run_dir)
    run.wait(90)
    restarted = {label for label, rows in run.status().items() if sum(row["restarts"] for row in rows)}
    assert restarted == {place.split()[0] for place in places}
    return (run_dir / "result").read_text()


@pytest.mark.parametrize(
    "places",
    [
        ("feeder", "evaluator"),
        pytest.param(("feeder", "evaluator", "trainer"), marks=pytest.mark.slow),
        pytest.param(("stages 1",), marks=pytest.mark.slow),
        pytest.param(("stages 0",), marks=pytest.mark.slow),
        pytest.param(("stages at once",), marks=pytest.mark.slow),
    ],
    ids=" and ".join,
)
def test_a_training_in_rounds_ends_with_the_same_bits(tmp_path: Path, places: tuple[str, ...]) -> None:
    undisturbed = trained("thread", tmp_path / "whole", (), stages=1)
    assert trained("process", tmp_path / "killed", places, stages=2) == undisturbed
