"""Nodes of a checkpoint that have lost their state: no caller gets an answer, and nothing is saved."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.checkpoint import Checkpoints, checkpoints_in
from lp_pipe.errors import CheckpointError
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("no_leaks")


class Counter:
    """Dies when it is told to."""

    def __init__(self, lives: list[int] | None = None) -> None:
        self._total = 0
        self._must_die = threading.Event()
        if lives is not None:
            lives.append(len(lives))

    def run(self) -> None:
        while not lp.stop_event().is_set():
            if self._must_die.wait(0.01):
                raise RuntimeError("told to die")

    def die(self) -> None:
        self._must_die.set()

    def add(self, number: int) -> int:
        self._total += number
        return self._total

    def state_dict(self) -> int:
        return self._total

    def load_state_dict(self, state: int) -> None:
        self._total = state


class Driver:
    """Makes checkpoints when it is told to."""

    def __init__(self, parts: dict[str, Any], options: dict[str, Any]) -> None:
        self._checkpoints = Checkpoints(parts, **options)

    def save(self, step: int) -> None:
        self._checkpoints.save(step)

    def restore(self) -> int | None:
        found = self._checkpoints.restore()
        return found.step if found else None


class Counted:
    """A program of a counter and a driver. lives: grows by one whenever the counter is built."""

    def __init__(self, folder: Path, *, is_part: bool = True, inside: Any = None, **options: Any) -> None:
        self.lives: list[int] = []
        program = lp.Program("counted")
        with program.group("counter", on_failure="restart"):
            node = lp.CourierNode(Counter, self.lives)
            if inside is None:
                handle = program.add_node(node)
            else:
                colocation = inside([lp.PyNode(lp.wait_for_stop)])
                handle = colocation.add_node(node)
                program.add_node(colocation)
        parts = {"counter": handle} if is_part else {"driver": Counter()}
        program.add_node(lp.CourierNode(Driver, parts, options), label="driver")
        self.run = lp.launch(program, "thread", run_dir=folder)
        self.counter, self.driver = self.run.client(handle), self.run.client("driver")

    def strike(self) -> None:
        before = len(self.lives)
        self.counter.die()
        until(lambda: len(self.lives) > before)


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[Counted]:
    found = Counted(tmp_path)
    yield found
    found.run.stop()


def test_who_calls_a_lost_part_is_told_until_it_was_restored(counted: Counted) -> None:
    counted.counter.add(3)
    counted.driver.save(1)
    counted.counter.add(4)
    counted.strike()
    for call in (lambda: counted.counter.add(1), counted.counter.state_dict):
        with pytest.raises(lp.StateLost, match="counter/0"):
            call()
    assert counted.driver.restore() == 1
    assert counted.counter.add(1) == 4


def test_a_lost_part_is_in_no_checkpoint(counted: Counted, tmp_path: Path) -> None:
    counted.counter.add(3)
    counted.driver.save(1)
    counted.strike()
    with pytest.raises(CheckpointError, match="lost its state"):
        counted.driver.save(2)
    assert [path.name for path in checkpoints_in(tmp_path / "checkpoints")] == ["step-00000001"]
    assert counted.driver.restore() == 1
    counted.counter.add(5)
    counted.driver.save(2)
    counted.strike()
    assert counted.driver.restore() == 2
    assert counted.counter.state_dict() == 8


def test_a_save_that_may_fail_is_an_error_where_a_part_is_lost(tmp_path: Path) -> None:
    counted = Counted(tmp_path, may_fail=True)
    counted.driver.save(1)
    counted.strike()
    with pytest.raises(CheckpointError, match="lost its state"):
        counted.driver.save(2)
    counted.run.stop()


def test_without_a_checkpoint_a_lost_part_stays_lost(counted: Counted) -> None:
    counted.counter.add(3)
    counted.strike()
    assert counted.driver.restore() is None
    with pytest.raises(lp.StateLost):
        counted.counter.add(1)


def test_a_node_that_takes_no_part_goes_on_with_its_initial_state(tmp_path: Path) -> None:
    counted = Counted(tmp_path, is_part=False)
    counted.driver.save(1)
    counted.counter.add(3)
    counted.strike()
    assert counted.counter.add(1) == 1
    counted.run.stop()


def test_a_part_in_a_colocation_is_lost_with_it(tmp_path: Path) -> None:
    counted = Counted(tmp_path, inside=lp.MultiThreadingColocation)
    counted.counter.add(3)
    counted.driver.save(1)
    counted.strike()
    with pytest.raises(lp.StateLost):
        counted.counter.add(1)
    assert counted.driver.restore() == 1
    assert counted.counter.add(1) == 4
    counted.run.stop()
