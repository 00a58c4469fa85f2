"""`lp_pipe doctor` on this machine, and on a worse one."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.commands import COMMAND, PATIENCE_S, Command

NAMES = ["python", "lp_pipe", "numpy", "protobuf", "torch", "open files", "processes", "/dev/shm", "hostname"]
NAMES += ["loopback", "unix socket", "run folder", "death signals", "fork", "gpu"]


def by_name(output: str) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in map(json.loads, output.splitlines())}


def test_a_machine_that_runs_these_tests_is_healthy(command: Command) -> None:
    done = command("doctor", "--json")
    checks = by_name(done.stdout)
    assert (done.returncode, done.stderr, list(checks)) == (0, "", NAMES)
    assert {check["level"] for check in checks.values()} <= {"ok", "warn"}
    assert all(check["fix"] for check in checks.values() if check["level"] == "warn")
    assert checks["fork"]["level"] == checks["unix socket"]["level"] == "ok"


def test_what_fails_has_a_line_with_the_command_that_fixes_it(folder: Path) -> None:
    limited = ["bash", "-c", 'ulimit -Sn 200; exec "$@"', "bash", *COMMAND, "doctor"]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=PATIENCE_S, cwd=folder, check=False)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    place = lines.index("fail  open files     200: room for about 50 node processes")
    assert lines[place + 1].startswith("                     fix: ulimit -n ")


def test_a_state_folder_that_cannot_be_written_is_named(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "file"))
    monkeypatch.delenv("LP_PIPE_RUNS", raising=False)
    done = command("doctor", "--json")
    check = by_name(done.stdout)["run folder"]
    assert (done.returncode, check["level"]) == (0, "warn")
    assert check["text"].startswith(f"{folder}/file/lp_pipe/runs cannot be written (Not a directory): ")


def test_a_temporary_folder_with_a_long_path_is_named(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = folder / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    checks = by_name(command("doctor", "--json").stdout)
    assert checks["unix socket"]["level"] == "warn"
    assert checks["unix socket"]["text"] == f"the path of {long} is too long for sockets; /tmp is used instead"
    assert list(long.iterdir()) == []
