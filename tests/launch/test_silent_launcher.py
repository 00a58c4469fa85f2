"""A launcher that is frozen: its nodes wait a while for it, and then take it for dead."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.waiting import until

SCRIPT = """
import os, signal, sys, time
import lp_pipe as lp

def obedient(folder):
    while not lp.wait_for_stop(0.05):
        open(f"{folder}/beats", "a").write("x")

def stubborn():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.fork()
    while True:
        time.sleep(1)

class Echo:
    def echo(self, value):
        return value

program = lp.Program("frozen")
program.add_node(lp.PyNode(obedient, sys.path[0]), label="obedient")
program.add_node(lp.PyNode(stubborn), label="stubborn")
program.add_node(lp.CourierNode(Echo), label="echo")
with lp.launch(program, "process", grace=0.2) as run:
    echo = run.client("echo")
    echo.echo(1)
    print("ready", flush=True)
    while not os.path.exists(f"{sys.path[0]}/end"):
        time.sleep(0.05)
    states = {row["state"] for rows in run.status().values() for row in rows}
    print("went on", echo.echo(2), states, flush=True)
"""


def launched(script: "Callable[[str], subprocess.Popen[str]]") -> "tuple[subprocess.Popen[str], list[psutil.Process]]":
    launcher = script(SCRIPT)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    until((Path(str(launcher.args[-1])).parent / "beats").exists)  # type: ignore[index]
    family = psutil.Process(launcher.pid).children(recursive=True)
    assert len(family) >= 4
    return launcher, family


def is_alive(process: psutil.Process) -> bool:
    """A frozen launcher does not reap its template."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow  # 3 s of silence: tests/launch/test_failures.py
def test_nodes_tolerate_a_launcher_that_is_silent_for_four_seconds(
    script: "Callable[[str], subprocess.Popen[str]]", tmp_path: Path
) -> None:
    launcher, _ = launched(script)
    launcher.send_signal(signal.SIGSTOP)
    before = os.path.getsize(tmp_path / "beats")
    time.sleep(4.0)
    launcher.send_signal(signal.SIGCONT)
    assert os.path.getsize(tmp_path / "beats") > before
    (tmp_path / "end").touch()
    out, err = launcher.communicate(timeout=20.0)
    assert "went on 2 {'running'}" in out, err
    assert launcher.returncode == 0, err


@pytest.mark.slow  # 8 s of silence, and 5 s for its nodes
def test_a_launcher_that_stays_silent_counts_as_dead(
    script: "Callable[[str], subprocess.Popen[str]]", tmp_path: Path, socket_home: Path
) -> None:
    launcher, family = launched(script)
    launcher.send_signal(signal.SIGSTOP)
    frozen = time.monotonic()
    beats = tmp_path / "beats"
    until(lambda: time.time() - beats.stat().st_mtime > 1.0)  # the obedient node has been told to stop
    assert time.monotonic() - frozen > 5.0
    until(lambda: not any(is_alive(process) for process in family), frozen + 15.0 - time.monotonic())
    until(lambda: not list(socket_home.glob("lp-*")), 1.0)


@pytest.mark.slow
def test_a_launcher_that_wakes_up_too_late_says_what_happened(
    script: "Callable[[str], subprocess.Popen[str]]", tmp_path: Path
) -> None:
    launcher, family = launched(script)
    launcher.send_signal(signal.SIGSTOP)
    until(lambda: not any(is_alive(process) for process in family))
    launcher.send_signal(signal.SIGCONT)
    (tmp_path / "end").touch()
    _, err = launcher.communicate(timeout=20.0)
    assert "was frozen for" in err
    assert launcher.returncode == 1
