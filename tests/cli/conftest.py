"""The command as users run it: in a process of its own, in an empty folder."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import COMMAND, PATIENCE_S, Command, Start, Started


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def command(folder: Path) -> Command:
    """Runs `lp_pipe ARGUMENTS` to its end."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    return run


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts `lp_pipe ARGUMENTS`; what still runs at the end of the test is killed."""
    processes = []

    def begin(*arguments: str) -> Started:
        process = subprocess.Popen(
            [*COMMAND, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        return Started(process)

    yield begin
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)  # its nodes see that it is gone and end by themselves
            process.communicate(timeout=PATIENCE_S)
