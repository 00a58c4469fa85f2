"""A parameter server that was ended half-way goes on from its newest checkpoint: same bits, no update twice."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.checkpoint import checkpoints_in
from lp_pipe.programs.parameter_server import TrainingResult, parameter_server
from lp_pipe.programs.parameter_shards import Sgd, Vector
from tests.programs.conftest import WITHIN_S, Delivered
from tests.programs.marks import SERVERS, STEPS, WORKERS, Marks, Tally, marking


@dataclasses.dataclass
class Broken(Marks):
    """A task in which one worker fails half-way, and again after every restart, as long as the file is there."""

    broken: Path

    def gradient(self, parameters: Vector, step: int, rank: int) -> Vector:
        if (step, rank) == (STEPS // 2, 1) and self.broken.exists():
            raise RuntimeError("the worker fails half-way")
        return super().gradient(parameters, step, rank)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken"
    path.touch()
    return path


def trained(task: Marks, delivered: Delivered, mode: str, run_dir: Path, kind: str, sgd: Sgd) -> TrainingResult:
    result: TrainingResult = delivered.of(marking(task, delivered, kind, sgd), mode, run_dir=run_dir)
    return result


# In processes it is shown every day by tests/integration/test_chaos.py.
in_all_modes = pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])


@pytest.mark.usefixtures("no_leaks")
@in_all_modes
def test_synchronous_training_that_failed_is_resumed_and_ends_with_the_same_bits(
    mode: str, delivered: Delivered, broken: Path, tmp_path: Path
) -> None:
    undisturbed = trained(Marks(), delivered, "thread", tmp_path / "whole", "sync", Sgd())
    with pytest.raises(lp.NodeError, match="the worker fails half-way"):
        trained(Broken(broken), delivered, mode, tmp_path / "run", "sync", Sgd())
    checkpoints = [path.name for path in checkpoints_in(tmp_path / "run" / "checkpoints")]
    assert checkpoints and checkpoints[-1] <= f"step-{STEPS // 2:08}"
    broken.unlink()
    resumed = trained(Broken(broken), delivered, mode, tmp_path / "run", "sync", Sgd())
    assert resumed.sha256 == undisturbed.sha256
    assert resumed.updates == undisturbed.updates == [[STEPS] * WORKERS] * SERVERS


@pytest.mark.usefixtures("no_leaks")
@in_all_modes
def test_an_asynchronous_run_that_failed_and_is_resumed_loses_no_update_and_applies_none_twice(
    mode: str, delivered: Delivered, broken: Path, tmp_path: Path
) -> None:
    with pytest.raises(lp.NodeError, match="the worker fails half-way"):
        trained(Broken(broken), delivered, mode, tmp_path / "run", "async", Tally())
    assert checkpoints_in(tmp_path / "run" / "checkpoints")
    broken.unlink()
    resumed = trained(Broken(broken), delivered, mode, tmp_path / "run", "async", Tally())
    assert resumed.parameters.tolist() == [1.0] * (SERVERS * STEPS * WORKERS)
    assert resumed.updates == [[STEPS] * WORKERS] * SERVERS


@pytest.mark.usefixtures("no_leaks")
def test_a_run_that_was_done_delivers_its_result_again(delivered: Delivered, tmp_path: Path) -> None:
    results = [trained(Marks(), delivered, "thread", tmp_path / "run", "sync", Sgd()) for _ in range(2)]
    assert results[0].sha256 == results[1].sha256


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    ("option", "there", "here"),
    [("num_servers", 2, 1), ("num_workers", 2, 1), ("num_workers", 2, 3), ("mode", "sync", "async")],
)
def test_a_checkpoint_of_another_program_is_refused(
    delivered: Delivered, tmp_path: Path, option: str, there: Any, here: Any
) -> None:
    """Regression: servers waited for ever for workers that are gone, or delivered a result for no caller."""
    trained(Marks(), delivered, "thread", tmp_path / "run", "sync", Sgd())
    options: dict[str, Any] = {"num_workers": WORKERS, "num_servers": SERVERS, option: here}
    program = parameter_server(Marks(), steps=STEPS, on_result=print, **options)
    wanted = f"with {option}={there!r}, but this program has {here!r}: resume it with {option}={there!r}"
    with pytest.raises(lp.NodeError, match=wanted):
        lp.launch(program, "thread", run_dir=tmp_path / "run").wait(WITHIN_S)
