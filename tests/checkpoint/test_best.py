"""The best checkpoints by a monitored metric stay beside the newest ones, also after a resume."""

import math
from pathlib import Path
from typing import Any

import pytest

import lp_pipe.pipeline as pp
from lp_pipe.checkpoint import Checkpoints, checkpoints_in, open_checkpoint

pytestmark = pytest.mark.usefixtures("no_leaks")


class Training:
    """A pipeline as far as `Checkpoints.steps` is concerned, whose state is its step."""

    def __init__(self) -> None:
        self.step = 0

    def current_step(self) -> int:
        return self.step

    def steps(self, n: int) -> Any:
        for _ in range(n):
            self.step += 1
            yield pp.StepResult(self.step - 1, 0.0, {})

    def state_dict(self) -> int:
        return self.step

    def load_state_dict(self, state: int) -> None:
        self.step = state


def monitored(folder: Path, training: Training | None = None, **options: Any) -> Checkpoints:
    options = {"keep": 1, "keep_best": 2, "monitor": "loss", **options}
    return Checkpoints({"training": training or Training()}, folder, **options)


def kept(folder: Path) -> list[int]:
    return [open_checkpoint(path).step for path in checkpoints_in(folder)]


def best_of(checkpoints: Checkpoints) -> tuple[int, float]:
    best = checkpoints.best()
    assert best is not None
    return best.step, best.metrics["loss"]


LOSSES = {1: 0.5, 2: 0.3, 3: 0.7, 4: 0.3, 5: math.nan, 6: math.inf}


def test_the_best_are_kept_beside_the_newest(tmp_path: Path) -> None:
    checkpoints = monitored(tmp_path)
    assert checkpoints.best() is None
    for step, loss in LOSSES.items():
        checkpoints.save(step, metrics={"loss": loss, "accuracy": 0.9})
    assert kept(tmp_path) == [2, 4, 6]
    assert best_of(checkpoints) == (2, 0.3), "of equal ones the oldest"


def test_max_and_a_later_program_know_the_values_from_the_checkpoints(tmp_path: Path) -> None:
    for step, accuracy in enumerate((0.1, 0.8, 0.5, 0.9, 0.2, 0.3), start=1):
        resumed = monitored(tmp_path, monitor="accuracy", mode="max")
        resumed.restore()
        resumed.save(step, metrics={"accuracy": accuracy})
    assert kept(tmp_path) == [2, 4, 6]
    best = monitored(tmp_path, monitor="accuracy", mode="max").best()
    assert best is not None and best.step == 4


def test_a_loop_over_steps_records_what_it_measures(tmp_path: Path) -> None:
    training = Training()
    checkpoints = monitored(tmp_path, training, keep=2)
    losses = {2: 0.4, 3: 0.1, 4: 0.2, 6: 0.3, 8: 0.5, 10: 0.6}
    for result in checkpoints.steps(training, 10, save_every=2):
        step = result.step + 1
        if step in losses:
            checkpoints.record({"loss": losses[step]})
    assert kept(tmp_path) == [4, 6, 8, 10]
    assert best_of(checkpoints) == (4, 0.2), "what step 3 had is no value of a checkpoint"


def test_a_damaged_checkpoint_is_not_the_best(tmp_path: Path) -> None:
    checkpoints = monitored(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(step, metrics={"loss": step})
    (tmp_path / "step-00000001" / "training.state").write_bytes(b"")
    assert best_of(checkpoints) == (2, 2.0)


@pytest.mark.parametrize(
    "options",
    [{"monitor": None}, {"keep_best": -1}, {"mode": "least"}],
    ids=["no monitor", "a negative number", "an unknown mode"],
)
def test_options_without_a_meaning_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"keep_best|mode"):
        monitored(tmp_path, **options)


def test_a_misspelt_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'loss'.*validation_loss"):
        monitored(tmp_path).save(1, metrics={"validation_loss": 1.0})
    with pytest.raises(TypeError, match="loss"):
        monitored(tmp_path).save(1, metrics={"loss": "small"})
    with pytest.raises(ValueError, match="monitor"):
        monitored(tmp_path, keep_best=0, monitor=None).best()
    assert kept(tmp_path) == []


def test_early_stopping_takes_part_in_checkpoints(tmp_path: Path) -> None:
    def losses_until_stop(interrupted_at: int | None) -> list[int]:
        seen: list[int] = []
        while True:
            training, stop = Training(), pp.EarlyStopping(patience=2)
            folder = tmp_path / str(interrupted_at)
            checkpoints = Checkpoints({"training": training, "stop": stop}, folder)
            for result in checkpoints.steps(training, 100, save_every=1):
                seen.append(result.step)
                if stop({0: 0.5, 1: 0.4, 2: 0.6}.get(result.step, 0.45)):
                    return seen
                if result.step == interrupted_at and seen.count(result.step) == 1:
                    break
            checkpoints.wait_until_written()

    assert losses_until_stop(None) == [0, 1, 2, 3]
    assert losses_until_stop(2) == [0, 1, 2, 2, 3]
