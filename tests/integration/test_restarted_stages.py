"""A stage that is killed starts again in its place, and the training ends with the same bits."""

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


@pytest.fixture
def without_torch() -> None:
    """Let templates preload torch: otherwise each stage needs a second to load it."""


class KillsItself(nn.Module):
    """Ends its process in a forward of training, `times` times; each time it leaves a file."""

    def __init__(self, folder: Path, step_calls: int, times: int) -> None:
        super().__init__()
        self._folder, self._after, self._times = folder, step_calls, times
        self._calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self._calls += self.training
        deaths = len(list(self._folder.iterdir()))
        if self._calls == self._after and deaths < self._times:
            (self._folder / str(deaths)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return value


def lower_each_time(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    """Return a scheduler that lowers the rate at each metric but the first, which is better than none."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def trained(
    mode: str,
    run_dir: Path,
    deaths: Path,
    *,
    stage: int,
    times: int,
    schedule: str,
    calls: int = 9,
    on_failure: str = "restart",
    mirror_every: int | None = None,
    metric_every: int | None = None,
) -> str:
    """The fingerprint after 8 steps; which ones there were is in the file `steps`.

    calls: of the layer that kills its process, the last of which does it.
    """
    deaths.mkdir()
    layers: list[Any] = [pp.Layer(nn.Linear, 6, 8), pp.Layer(nn.Dropout, 0.5), pp.Layer(nn.Linear, 8, 2)]
    layers.insert(2 * stage, pp.Layer(KillsItself, deaths, calls, times))
    model = pp.Model(layers, squared_error, torch.optim.Adam, lower_each_time if metric_every is not None else None)

    def train(pipeline: pp.PipelineClient) -> None:
        checkpoints = Checkpoints({"pipeline": pipeline})
        steps = []
        for result in checkpoints.steps(pipeline, 8, save_every=3, mirror_every=mirror_every):
            steps.append(result.step)
            if metric_every is not None and (result.step + 1) % metric_every == 0:
                pipeline.scheduler_step(1.0)
        (run_dir / "steps").write_text(str(steps))
        (run_dir / "fingerprint").write_text(pipeline.fingerprint())
        lp.stop()

    program = lp.Program("restarted")
    feeder = program.add_node(lp.CourierNode(Feeder), label="feeder")
    options: dict[str, Any] = {"microbatches": 2, "inputs": feeder, "on_failure": on_failure}
    pipeline = pp.add_pipeline(program, model, stages=[2], schedule=schedule, **options)
    program.add_node(lp.PyNode(train, pipeline), label="trainer")
    lp.launch(program, mode, run_dir=run_dir).wait(90)
    return (run_dir / "fingerprint").read_text()


@pytest.mark.parametrize(
    ("stage", "times", "schedule"),
    [
        (1, 1, "1f1b"),
        pytest.param(0, 2, "1f1b", marks=pytest.mark.slow),
        pytest.param(1, 1, "pipedream", marks=pytest.mark.slow),
    ],
)
def test_a_killed_stage_is_restarted_and_the_training_ends_with_the_same_bits(
    tmp_path: Path, stage: int, times: int, schedule: str
) -> None:
    options = {"stage": stage, "schedule": schedule}
    undisturbed = trained("thread", tmp_path / "whole", tmp_path / "never", times=0, **options)
    assert trained("process", tmp_path / "killed", tmp_path / "deaths", times=times, **options) == undisturbed
    assert len(list((tmp_path / "deaths").iterdir())) == times


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_with_mirrors_no_step_that_was_finished_comes_again(tmp_path: Path, stage: int) -> None:
    options: dict[str, Any] = {"stage": stage, "schedule": "1f1b"}
    undisturbed = trained("thread", tmp_path / "whole", tmp_path / "never", times=0, **options)
    killed = trained("process", tmp_path / "killed", tmp_path / "deaths", times=1, mirror_every=1, **options)
    assert killed == undisturbed
    assert (tmp_path / "killed" / "steps").read_text() == str([*range(8)])  # it died in step 4, its checkpoint is 3's


@pytest.mark.slow
@pytest.mark.parametrize("mirror_every", [None, 1])
def test_a_scheduler_of_a_metric_goes_back_with_the_stages(tmp_path: Path, mirror_every: int | None) -> None:
    options: dict[str, Any] = {"stage": 1, "schedule": "1f1b", "metric_every": 1, "mirror_every": mirror_every}
    undisturbed = trained("thread", tmp_path / "whole", tmp_path / "never", times=0, **options)
    assert trained("process", tmp_path / "killed", tmp_path / "deaths", times=1, **options) == undisturbed
    options["metric_every"] = 2
    assert trained("thread", tmp_path / "other", tmp_path / "neither", times=0, **options) != undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("mirror_every", [None, 2])
def test_a_metric_comes_after_the_same_step_as_without_the_death(tmp_path: Path, mirror_every: int | None) -> None:
    # Of an asynchronous schedule: after a death steps ran alone, and the metric of step 5 came before step 6.
    options: dict[str, Any] = {"stage": 1, "schedule": "pipedream", "metric_every": 3, "mirror_every": mirror_every}
    options["calls"] = 11  # in the forwards of step 5, which are ahead of a step that is ahead itself: of result 3
    undisturbed = trained("thread", tmp_path / "whole", tmp_path / "never", times=0, **options)
    assert trained("process", tmp_path / "killed", tmp_path / "deaths", times=1, **options) == undisturbed


@pytest.mark.slow
def test_without_restarts_a_killed_stage_ends_the_program(tmp_path: Path) -> None:
    with pytest.raises(lp.NodeError, match="SIGKILL") as caught:
        trained("process", tmp_path / "run", tmp_path / "deaths", stage=1, times=1, schedule="1f1b", on_failure="stop")
    assert caught.value.label == "stages"
