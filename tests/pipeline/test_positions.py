"""The report of a hang in a pipeline says where each stage is in its schedule."""

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp

pytestmark = pytest.mark.usefixtures("no_leaks")

WITHIN_S = 60.0
_STAGE_0 = [
    "  stages/0: backward of micro-batch 0, stage 0 (layers 0 to 0), step 0, 2 actions done",
    # Threads of one process draw their random numbers in turn: there it may wait for stage 1's forward.
    "  stages/0: forward of micro-batch 1, stage 0 (layers 0 to 0), step 0, 1 action done",
]


class Stuck(nn.Module):
    """Goes on once a file is there."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def forward(self, value: Tensor) -> Tensor:
        deadline = time.monotonic() + 2 * WITHIN_S
        while not self._file.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return value


class Trainer:
    def __init__(self, pipeline: pp.PipelineClient) -> None:
        self._pipeline = pipeline

    def run(self) -> None:
        self._pipeline.step((torch.ones(4, 2), torch.ones(4, 2)))
        lp.stop()


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_report_has_the_schedule_position_of_every_stage_and_all_stacks(mode: str, tmp_path: Path) -> None:
    program = lp.Program("positions")
    may_go_on = tmp_path / "may go on"
    layers = [pp.Layer(nn.Linear, 2, 2), pp.Layer(nn.Linear, 2, 2), pp.Layer(Stuck, may_go_on)]
    model = pp.Model(layers, nn.functional.mse_loss, lambda parameters: torch.optim.SGD(parameters, 0.1))
    pipeline = pp.add_pipeline(program, model, stages=[1], microbatches=2)
    program.add_node(lp.PyClassNode(Trainer, pipeline), label="trainer")
    with lp.launch(program, mode, run_dir=tmp_path, hang_after=0.5) as run:
        text = reports(run)
        assert "  stages/1: forward of micro-batch 0, stage 1 (layers 1 to 2), step 0, 0 actions done" in text
        assert "in forward" in text.partition("stacks of all nodes:")[2]
        may_go_on.touch()
        run.wait(WITHIN_S)


def reports(run: lp.Run) -> str:
    """Return the reports on a program once everything has stopped that will."""
    path = run.run_dir / "hangs.log"
    deadline = time.monotonic() + WITHIN_S
    while True:
        text = path.read_text() if path.exists() else ""
        stuck = text.rpartition("where the stages are")[2]
        if "stages/1: forward" in stuck and "stacks of all nodes:" in stuck and any(map(stuck.__contains__, _STAGE_0)):
            return stuck
        assert time.monotonic() < deadline, text
        time.sleep(0.02)
