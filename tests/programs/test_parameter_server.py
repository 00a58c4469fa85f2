"""Synchronous and asynchronous SGD on real digits."""

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest

import lp_pipe as lp
from lp_pipe.programs.digits import Digits, Vector, load_digits
from lp_pipe.programs.parameter_server import TrainingResult, parameter_server
from lp_pipe.programs.parameter_shards import Sgd
from tests.programs.conftest import Delivered, Once, kill_this_process, stop_when

SGD = Sgd(learning_rate=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_digits(seed=3)


def plain_loop(task: Digits, num_workers: int, steps: int) -> Vector:
    """The same training without any program."""
    parameters = task.initial_parameters()
    velocity = np.zeros_like(parameters)
    for step in range(steps):
        total = np.zeros_like(parameters)
        for rank in range(num_workers):
            total += task.gradient(parameters, step, rank)
        velocity = SGD.momentum * velocity + total / num_workers
        parameters = parameters - SGD.learning_rate * velocity
    return parameters


def test_synchronous_training_equals_a_plain_loop_to_the_last_bit(
    mode: str, delivered: Delivered, digits: Digits
) -> None:
    expected = plain_loop(digits, num_workers=3, steps=300)
    for num_servers in (1, 2):
        program = parameter_server(
            digits, num_workers=3, steps=300, on_result=delivered, num_servers=num_servers, sgd=SGD
        )
        result: TrainingResult = delivered.of(program, mode)
        assert np.array_equal(result.parameters, expected)
        assert result.metrics["test_accuracy"] > 0.95
        assert result.updates == [[300] * 3] * num_servers
        assert (result.repeated, result.max_staleness) == (0, 0)


def test_the_digest_is_the_same_in_every_run_however_long_a_worker_takes(
    mode: str, delivered: Delivered, digits: Digits
) -> None:
    digests = set()
    for slow_rank in (0, 1):
        task = Slow(digits, slow_rank)
        program = parameter_server(task, num_workers=2, steps=30, on_result=delivered, sgd=SGD)
        digests.add(delivered.of(program, mode).sha256)
    plain = TrainingResult(plain_loop(digits, 2, 30), {}, [], 0, 0.0, 0)
    assert digests == {plain.sha256}


def test_asynchronous_training_applies_every_gradient_once_and_reports_staleness(
    mode: str, delivered: Delivered, digits: Digits
) -> None:
    program = parameter_server(
        digits, num_workers=2, steps=600, on_result=delivered, mode="async", num_servers=2, sgd=SGD
    )
    result: TrainingResult = delivered.of(program, mode)
    assert result.metrics["test_accuracy"] > 0.95
    assert result.updates == [[600] * 2] * 2
    assert result.repeated == 0
    assert 0 <= result.mean_staleness <= result.max_staleness <= 600


@pytest.mark.usefixtures("no_leaks")
def test_a_killed_worker_leaves_synchronous_training_unchanged(
    delivered: Delivered, digits: Digits, once: Once
) -> None:
    task = Deadly(digits, once)
    program = parameter_server(task, num_workers=2, steps=60, on_result=delivered, num_servers=2, sgd=SGD)
    result: TrainingResult = delivered.of(program, "process")
    assert delivered.restarts("workers") == 1
    assert np.array_equal(result.parameters, plain_loop(digits, 2, 60))
    assert result.updates == [[60, 60]] * 2


@pytest.mark.usefixtures("no_leaks")
def test_a_killed_worker_loses_no_asynchronous_update(delivered: Delivered, digits: Digits, once: Once) -> None:
    task = Deadly(digits, once)
    program = parameter_server(task, num_workers=2, steps=60, on_result=delivered, mode="async", num_servers=2, sgd=SGD)
    result: TrainingResult = delivered.of(program, "process")
    assert delivered.restarts("workers") == 1
    assert result.updates == [[60, 60]] * 2


def test_a_stop_half_way_waits_for_nobody_and_fails_nobody(mode: str, digits: Digits, tmp_path: Path) -> None:
    task = Blocking(digits, tmp_path / "blocked")
    stop_when(tmp_path / "blocked", parameter_server(task, num_workers=2, steps=9, on_result=print), mode)


def test_what_cannot_be_is_refused(digits: Digits) -> None:
    with pytest.raises(ValueError, match=r"'bsp'.*sync.*async"):
        parameter_server(digits, num_workers=1, steps=1, on_result=print, mode="bsp")
    with pytest.raises(ValueError, match="num_workers=0"):
        parameter_server(digits, num_workers=0, steps=1, on_result=print)


def test_the_gradient_is_the_slope_of_the_loss(digits: Digits) -> None:
    whole = dataclasses.replace(digits, test_images=digits.train_images, test_labels=digits.train_labels)
    whole = dataclasses.replace(whole, batch_size=len(digits.train_labels))  # the batch is everything, in some order
    parameters = whole.initial_parameters()
    gradient = whole.gradient(parameters, step=0, rank=0)
    for index in (70, 64 * 64 + 3, len(parameters) - 1):
        step = np.zeros_like(parameters)
        step[index] = 1e-6
        slope = (whole.evaluate(parameters + step)["test_loss"] - whole.evaluate(parameters - step)["test_loss"]) / 2e-6
        assert gradient[index] == pytest.approx(slope, abs=1e-6)


@dataclasses.dataclass
class Wrapped:
    """The digits, with something happening before a gradient."""

    digits: Digits

    def before(self, step: int, rank: int) -> None:
        raise NotImplementedError

    def initial_parameters(self) -> Vector:
        return self.digits.initial_parameters()

    def gradient(self, parameters: Vector, step: int, rank: int) -> Vector:
        self.before(step, rank)
        return self.digits.gradient(parameters, step, rank)

    def evaluate(self, parameters: Vector) -> dict[str, float]:
        return self.digits.evaluate(parameters)


@dataclasses.dataclass
class Slow(Wrapped):
    """A task in which some of one worker's gradients take longer."""

    rank: int

    def before(self, step: int, rank: int) -> None:
        if rank == self.rank and step % 3 == 0:
            time.sleep(0.005)


@dataclasses.dataclass
class Deadly(Wrapped):
    """A task in which one worker is killed while it computes its 20th gradient."""

    once: Once

    def before(self, step: int, rank: int) -> None:
        if rank == 1 and step == 20 and self.once():
            kill_this_process()


@dataclasses.dataclass
class Blocking(Wrapped):
    """A task in which one worker waits for the stop."""

    path: Path

    def before(self, step: int, rank: int) -> None:
        if rank == 1 and step == 3:
            self.path.touch()
            lp.wait_for_stop()
