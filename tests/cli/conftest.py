"""The command as users run it: in a process of its own, in an empty folder."""

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import COMMAND, PATIENCE_S, SERVER, Command, Start, Started


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


@pytest.fixture(scope="session")
def command_server() -> "Iterator[subprocess.Popen[str]]":
    with subprocess.Popen(SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server


@pytest.fixture
def brief_command(
    command_server: "subprocess.Popen[str]", folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Command:
    """Run a command without the time that imports take: for commands that start no node, such as `status`."""
    outputs = tmp_path_factory.mktemp("outputs")
    numbers = itertools.count()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        out, err = (outputs / f"{next(numbers)}.{stream}" for stream in ("out", "err"))
        asked = {"arguments": arguments, "folder": str(folder), "env": dict(os.environ), "patience_s": PATIENCE_S}
        assert command_server.stdin is not None and command_server.stdout is not None
        command_server.stdin.write(json.dumps({**asked, "out": str(out), "err": str(err)}) + "\n")
        command_server.stdin.flush()
        status = int(command_server.stdout.readline())
        return subprocess.CompletedProcess(arguments, status, out.read_text(), err.read_text())

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
