"""Ctrl+Z at the launcher, and schedulers that suspend a whole job: all sleep, and go on as if nothing had been."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import until

WITHIN_S = 20.0
NODES_PATIENCE_S = 8.0  # with a launcher that says nothing

# "beating" appends a byte for each beat, in a process in every mode; "asking" waits in one call all the time, which is
# no hang.
SCRIPT = """
import multiprocessing, os, sys, time
import lp_pipe as lp

def sleep():
    while True:
        time.sleep(0.05)

def beating(folder):
    multiprocessing.get_context("fork").Process(target=sleep, daemon=True).start()  # as a DataLoader has workers
    while not lp.wait_for_stop(0.05):
        open(f"{folder}/beats", "a").write("x")

class Slow:
    def reply(self):
        lp.wait_for_stop()

def asking(slow):
    slow.reply()

program = lp.Program("sleepy")
node = lp.PyNode(beating, sys.path[0])
program.add_node(lp.MultiProcessingColocation([node]) if MODE == "thread" else node, label="beating")
slow = program.add_node(lp.CourierNode(Slow), label="slow")
program.add_node(lp.PyNode(asking, slow), label="asking")
with lp.launch(program, MODE, run_dir=f"{sys.path[0]}/run", grace=2, hang_after=6) as run:
    while not os.path.exists(f"{sys.path[0]}/end"):
        time.sleep(0.05)
    print("awake", flush=True)
"""


@pytest.fixture
def launched(script: Any, tmp_path: Path) -> "Callable[[str], subprocess.Popen[str]]":
    """Launch it in a mode; returns once it beats."""

    def launch(mode: str) -> "subprocess.Popen[str]":
        launcher: subprocess.Popen[str] = script(SCRIPT.replace("MODE", repr(mode)))
        until((tmp_path / "beats").exists)
        return launcher

    return launch


def beats(folder: Path) -> int:
    return os.path.getsize(folder / "beats")


def family(launcher: "subprocess.Popen[str]") -> tuple[psutil.Process, list[psutil.Process]]:
    """The template, and all below it."""
    (template,) = psutil.Process(launcher.pid).children()
    return template, template.children(recursive=True)


def is_stopped(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_STOPPED)


def press_ctrl_z(launcher: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Returns the processes of its nodes, when all have stopped."""
    launcher.send_signal(signal.SIGTSTP)
    until(lambda: is_stopped(psutil.Process(launcher.pid)))
    _, nodes = family(launcher)
    assert len(nodes) >= 2
    until(lambda: all(is_stopped(node) for node in nodes))
    return nodes


def end(launcher: "subprocess.Popen[str]", folder: Path, after_beats: int = 1) -> str:
    """Let the program end after so many more beats, and return what it printed as its own errors."""
    due = beats(folder) + after_beats
    until(lambda: beats(folder) >= due)
    (folder / "end").touch()
    out, err = launcher.communicate(timeout=WITHIN_S)
    assert (out, launcher.returncode) == ("awake\n", 0), err
    return err


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_ctrl_z_stops_the_nodes_too_and_fg_lets_all_go_on(launched: Any, tmp_path: Path, mode: str) -> None:
    launcher = launched(mode)
    press_ctrl_z(launcher)
    launcher.send_signal(signal.SIGCONT)
    assert end(launcher, tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["thread", "process"])
def test_it_may_sleep_for_longer_than_its_nodes_wait_for_a_silent_launcher(
    launched: Any, tmp_path: Path, mode: str
) -> None:
    launcher = launched(mode)
    press_ctrl_z(launcher)
    asleep = beats(tmp_path)
    time.sleep(NODES_PATIENCE_S + 2)
    assert beats(tmp_path) == asleep
    launcher.send_signal(signal.SIGCONT)
    assert end(launcher, tmp_path) == ""


@pytest.mark.slow  # 5 s: what nodes have to end when their launcher has been killed
def test_a_launcher_that_is_killed_in_its_sleep_leaves_nobody_behind(launched: Any) -> None:
    launcher = launched("process")
    template, _ = family(launcher)
    nodes = press_ctrl_z(launcher)
    launcher.kill()
    _, alive = psutil.wait_procs([template, *nodes], timeout=WITHIN_S)
    assert not alive


def test_a_launcher_of_several_hosts_stays_awake(launched: Any, tmp_path: Path) -> None:
    launcher = launched("multi_host")
    launcher.send_signal(signal.SIGTSTP)
    assert "Ctrl+Z is ignored" in launcher.stderr.readline()
    end(launcher, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["process", "multi_host"])
@pytest.mark.parametrize("seconds", [NODES_PATIENCE_S - 0.5, NODES_PATIENCE_S + 4])
def test_a_job_that_is_suspended_as_a_whole_goes_on(launched: Any, tmp_path: Path, mode: str, seconds: float) -> None:
    """Send SIGSTOP to each process, as `scontrol suspend` does, without a notice before."""
    launcher = launched(mode)
    everybody = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
    for process in everybody:
        process.suspend()
    time.sleep(seconds)
    for process in everybody:
        process.resume()
    end(launcher, tmp_path, after_beats=60)  # 3 s, in which it has looked for hangs
    assert not (tmp_path / "run/hangs.log").exists()
