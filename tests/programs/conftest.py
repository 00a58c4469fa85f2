"""Results of programs, which appear in one of their nodes and are looked at here."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import lp_pipe as lp

WITHIN_S = 60.0


class Delivered:
    """An `on_result` that keeps the result in a file; delivered twice is an error."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, result: Any) -> None:
        assert not self._path.exists(), "delivered before"
        self._path.write_bytes(cloudpickle.dumps(result))

    def of(self, program: lp.Program, mode: str, run_dir: Path | None = None) -> Any:
        """Run the program to its end; its result."""
        run = lp.launch(program, mode, run_dir=run_dir)
        run.wait(WITHIN_S)
        self.status = run.status()
        result = cloudpickle.loads(self._path.read_bytes())
        self._path.unlink()
        return result

    def restarts(self, label: str) -> int:
        """Return the restarts of all nodes of the group, in the last run."""
        return sum(row["restarts"] for row in self.status[label])


class Once:
    """A function that is true at the first call, in any process, and False ever after."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self) -> bool:
        try:
            self._path.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def kill_this_process() -> None:
    """Kill this process as `kill -9` does, or a kernel without memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_when(there: Path, program: lp.Program, mode: str) -> None:
    """Run until the file is there, then stop: that takes none of the grace, and no node counts as failed."""
    run = lp.launch(program, mode)
    deadline = time.monotonic() + WITHIN_S
    while not there.exists():
        assert time.monotonic() < deadline, f"there is no {there}"
        time.sleep(0.01)
    start = time.monotonic()
    run.stop()
    assert time.monotonic() - start < 4.0  # the grace is 5
    run.wait(0)
    assert {row["error"] for rows in run.status().values() for row in rows} == {None}


@pytest.fixture
def delivered(tmp_path: Path) -> Delivered:
    return Delivered(tmp_path / "result")


@pytest.fixture
def once(tmp_path: Path) -> Once:
    return Once(tmp_path / "once")


@pytest.fixture
def no_leaks(warm_template: None, no_leaks: None) -> None:
    """As for all tests, but with a template that was there before the test."""


@pytest.fixture(autouse=True)
def _fast_launches(warm_template: None) -> None:
    """Import torch once, and not at each launch."""
