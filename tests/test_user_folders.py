"""Runs of an account without a home folder that can be written."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import lp_pipe as lp
from lp_pipe.launch import run_dir
from lp_pipe.launch.run_records import entries
from lp_pipe.user_folders import cache_folder, state_folder


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, socket_home: Path) -> Path:
    """An account without a home folder; returns the folder that stands in for it."""
    (socket_home / "file").touch()
    monkeypatch.setenv("HOME", str(socket_home / "file" / "home"))
    for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "LP_PIPE_RUNS"):
        monkeypatch.delenv(variable)
    run_dir._warn_that_runs_are_temporary.cache_clear()
    return socket_home / f"lp_pipe-{os.getuid()}"


def launched() -> Path:
    program = lp.Program("homeless")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="node")
    with lp.launch(program, "thread", listed=True) as run:
        assert [record.run_dir for record in entries().values()] == [str(run.run_dir)]
    return run.run_dir


def test_runs_without_a_home_folder_are_in_a_private_temporary_one(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert launched().parent == temporary / "state" / "runs"
    assert launched().parent == temporary / "state" / "runs"
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # once
    assert temporary.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == temporary / "cache"


def test_variables_come_before_the_temporary_folder(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LP_PIPE_RUNS", str(tmp_path / "runs"))
    assert launched().parent == tmp_path / "runs"
    monkeypatch.delenv("LP_PIPE_RUNS")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert launched().parent == tmp_path / "state" / "lp_pipe" / "runs"
    assert not caplog.records


def test_a_temporary_folder_that_is_a_link_is_not_used(temporary: Path, tmp_path: Path) -> None:
    temporary.symlink_to(tmp_path)
    with pytest.raises(lp.LaunchError):
        state_folder()
    with pytest.raises(lp.LaunchError):
        launched()


def test_a_user_whom_the_system_does_not_know_can_launch(temporary: Path, tmp_path: Path) -> None:
    source = "import lp_pipe as lp; p = lp.Program('p'); p.add_node(lp.PyNode(int), label='n'); lp.launch(p).wait(60)"
    become = ["unshare", "--user", "--map-user=12345"]
    try:
        subprocess.run([*become, "true"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no user namespaces for this user")
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    done = subprocess.run(
        [*become, sys.executable, "-c", source],
        env={**environment, "TMPDIR": tempfile.gettempdir()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (temporary.parent / "lp_pipe-12345" / "state" / "runs").is_dir()
