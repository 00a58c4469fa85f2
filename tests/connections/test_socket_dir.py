"""The private folder of a run's sockets is removed by the last process that uses it, or found by `lp_pipe clean`."""

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lp_pipe.cli.main import main
from lp_pipe.connections import socket_dir
from lp_pipe.connections.socket_dir import abandoned_socket_dirs, make_socket_dir
from tests.launch.engines.programs import echo_script
from tests.waiting import until

MAKE_ONE = "from lp_pipe.connections.socket_dir import make_socket_dir; print(make_socket_dir())"


def made_by_another() -> Path:
    return Path(
        subprocess.run([sys.executable, "-c", MAKE_ONE], capture_output=True, text=True, check=True).stdout[:-1]
    )


def test_a_folder_is_abandoned_once_the_processes_that_it_names_have_ended(
    socket_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_socket_dir()  # by this process, which lives
    (socket_home / "lp-others").mkdir()  # names no process
    left = made_by_another()
    assert list(abandoned_socket_dirs()) == [left]
    monkeypatch.setattr(socket_dir, "_pid_namespace", lambda: "another container's")
    assert not list(abandoned_socket_dirs())


def test_clean_removes_abandoned_folders(socket_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = made_by_another()
    assert main(["clean", "--dry-run"]) == 0
    assert left.exists() and f"would remove {left}" in capsys.readouterr().out
    assert main(["clean"]) == 0
    assert not left.exists() and f"removed {left}" in capsys.readouterr().out


def test_an_agent_whose_template_died_with_the_launcher_removes_its_folder(
    script: "Callable[[str], subprocess.Popen[str]]", socket_home: Path
) -> None:
    launcher = script(echo_script("engine='local', hosts='2'"))
    assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
    family = psutil.Process(launcher.pid).children(recursive=True)
    forked = [one for one in family if "template_process" in " ".join(one.cmdline())]  # templates, and their nodes
    assert forked and len(list(socket_home.glob("lp-*"))) >= 2
    for process in (*forked, launcher):
        with contextlib.suppress(psutil.NoSuchProcess):  # a node that ended with its template
            process.kill()
    psutil.wait_procs(family, timeout=20.0)
    until(lambda: not list(socket_home.glob("lp-*")) or _only_of(launcher.pid, socket_home), 10.0)


def _only_of(pid: int, socket_home: Path) -> bool:
    """Whether the folders that are left are the killed launcher's own, which its entry names for `lp_pipe clean`."""
    return all((one / "processes").read_text().startswith(f"{pid} ") for one in socket_home.glob("lp-*"))
