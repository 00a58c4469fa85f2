"""Ctrl+C, SIGTERM and a closed terminal: everything ends within 10 seconds, in a few calm lines."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lp_pipe.connections.credentials import generate_credentials
from tests.cli.commands import COMMAND, PATIENCE_S, Start, is_alive

WAITING = """
import os, signal, threading
import lp_pipe as lp

def wait():
    print("pid", os.getpid())
    lp.wait_for_stop()

def ignore_everything():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("pid", os.getpid())
    while True:
        threading.Event().wait(1)

def save_and_wait():
    (lp.context().run_dir / "checkpoint").mkdir()
    lp.log_metrics({"loss": 1.0}, step=1)
    wait()

def make_program(*functions):
    program = lp.Program("waiting")
    with program.group("nodes"):
        for function in functions or (wait, wait, save_and_wait):
            program.add_node(lp.PyNode(function))
    return program

def stubborn():
    return make_program(wait, ignore_everything)

def quick():
    return make_program(int)

def fail():
    while not (lp.context().run_dir / "other").exists():
        threading.Event().wait(0.01)
    raise ValueError("mine")

def stop_slowly():
    (lp.context().run_dir / "other").touch()
    lp.wait_for_stop()
    print("told to stop")
    threading.Event().wait(2)

def failing():
    return make_program(stop_slowly, fail)
"""

SAVES_AT_THE_STOP = """(
        lp.wait_for_stop(), print("saving"), (lp.context().run_dir / f"saved-{lp.context().index}").touch())"""
# A session's first terminal; a program that has one gets its SIGHUP.
TAKES_THE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def waiting(folder: Path) -> None:
    (folder / "waiting.py").write_text(WAITING)


@pytest.mark.parametrize(
    ("number", "status", "notice"),
    [
        (signal.SIGINT, 130, "stopping (Ctrl+C again to kill) …"),
        (signal.SIGTERM, 143, "stopping (a second SIGTERM kills) …"),
        (signal.SIGHUP, 129, "stopping (a second SIGTERM kills) …"),
    ],
)
def test_an_interrupt_stops_the_nodes_and_says_what_was_saved(
    number: int, status: int, notice: str, start: Start
) -> None:
    run = start("launch", "waiting.py", "--run-dir=out")
    pids = run.pids(3)
    run.process.send_signal(number)
    ended, _, errors = run.finish()
    assert (ended, errors[0], len(errors)) == (status, notice, 2)
    assert errors[1].startswith("interrupted; 3 nodes stopped in ")
    assert errors[1].endswith("; run folder out (with checkpoint, metrics.jsonl)")
    assert not any(is_alive(pid) for pid in pids.values())


def test_a_node_that_ignores_stop_and_sigterm_is_gone_within_10_s(start: Start) -> None:
    run = start("launch", "waiting.py:stubborn")
    pids = run.pids(2)
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    status, _, errors = run.finish()
    assert time.monotonic() - began < 10
    assert (status, len(errors)) == (130, 3)
    assert errors[1].startswith("did not end within the grace of 5 s after the stop: nodes/1; ")
    assert not any(is_alive(pid) for pid in pids.values())


@pytest.mark.parametrize("is_json", [False, True], ids=["lines", "json"])
def test_an_interrupt_while_a_failure_ends_the_program_does_not_hide_the_failure(is_json: bool, start: Start) -> None:
    """Regression: the failed node was not named where another node took its time to stop."""
    run = start("launch", "waiting.py:failing", "--grace=60", *(["--json"] if is_json else []))
    run.wait_for("told to stop")
    run.process.send_signal(signal.SIGINT)
    status, lines, errors = run.finish()
    assert status == 130
    assert errors[1].endswith(" failed: ValueError: mine")
    assert errors[-1].startswith("interrupted; 2 nodes stopped in ")
    if is_json:
        last = json.loads(lines[-1])
        assert (last["event"], last["node"], last["type"]) == ("interrupted", "nodes/1", "ValueError")


def test_a_second_ctrl_c_does_not_wait_for_the_grace_period(start: Start) -> None:
    run = start("launch", "waiting.py:stubborn", "--grace=60", "--json")
    logs = [json.loads(run.wait_for('"line": "pid ')) for _ in range(2)]
    run.process.send_signal(signal.SIGINT)
    run.wait_for('"event": "note"')
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    status, events, _ = run.finish()
    assert time.monotonic() - began < 10
    assert status == 130
    assert json.loads(events[-1])["event"] == "interrupted"
    assert not any(is_alive(int(log["line"].split()[1])) for log in logs)


@pytest.mark.parametrize("options", [["--mode=process"], ["--mode=thread"], ["--json"]], ids=" ".join)
def test_a_terminal_that_is_closed_stops_the_nodes_in_order(folder: Path, options: list[str]) -> None:
    """Regression: the nodes were killed, and what they save at the stop was lost. They cannot print there any more."""
    (folder / "saves.py").write_text(WAITING.replace("lp.wait_for_stop()", SAVES_AT_THE_STOP))
    keyboard, terminal = os.openpty()
    command = [sys.executable, "-c", TAKES_THE_TERMINAL, *COMMAND, "launch", "saves.py", "--run-dir=out", *options]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True) as run:
        os.close(terminal)
        seen = b""
        while seen.count(b"pid ") < 3:
            seen += os.read(keyboard, 65536)
        os.close(keyboard)
        assert run.wait(PATIENCE_S) == 129
    assert len(list(folder.glob("out/saved-*"))) == 3


INTERRUPTED_ONCE_STARTED = """
import signal, sys
from lp_pipe.cli import launch, main

launch.to_svg = lambda view: signal.raise_signal(signal.SIGINT)
sys.exit(main.main())
"""


def test_an_interrupt_as_soon_as_the_nodes_are_started_stops_them_in_order(folder: Path) -> None:
    """Regression: while graph.svg was written, the nodes were only stopped at the end of the process."""
    command = [sys.executable, "-c", INTERRUPTED_ONCE_STARTED, "launch", "waiting.py", "--mode=thread", "--run-dir=out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 130
    assert "interrupted; 3 nodes stopped in " in done.stderr


INTERRUPTED_ON_RETURN = """
import signal, sys
from lp_pipe.cli import launch, main

launched = launch.launch
launch.launch = lambda *parts, **options: (launched(*parts, **options), signal.raise_signal(signal.SIGINT))
sys.exit(main.main())
"""


def test_an_interrupt_as_the_launch_returns_stops_nodes_that_can_still_print(folder: Path) -> None:
    """Regression: once in hundreds of runs the nodes were stopped at the end of the process, where printing fails."""
    (folder / "saves.py").write_text(WAITING.replace("lp.wait_for_stop()", SAVES_AT_THE_STOP))
    command = [sys.executable, "-c", INTERRUPTED_ON_RETURN, "launch", "saves.py", "--mode=thread", "--run-dir=out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (130, "lp_pipe: interrupted\n")
    assert done.stdout.count("] saving\n") == len(list(folder.glob("out/saved-*"))) == 3


TERMINATED_AT_THE_END = """
import signal, sys
from lp_pipe.cli import main
from lp_pipe.launch import run

signals = [signal.SIGTERM]
run.described_failure = lambda *parts: signal.raise_signal(signals.pop()) if signals else None
sys.exit(main.main())
"""


def test_a_sigterm_as_the_run_ends_by_itself_has_its_own_status(folder: Path) -> None:
    """The run had no ear for it any more, and the status was that of a Ctrl+C."""
    command = [sys.executable, "-c", TERMINATED_AT_THE_END, "launch", "waiting.py:quick", "--mode=thread"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 143
    notice, ended = done.stderr.splitlines()
    assert notice == "stopping (a second SIGTERM kills) …"
    assert ended.startswith("interrupted; 1 node stopped in ")


def test_an_interrupt_while_the_target_is_imported_is_one_line(start: Start, folder: Path) -> None:
    (folder / "slow.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    for number, expected in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        run = start("launch", "slow.py")
        run.wait_for("importing")
        run.process.send_signal(number)
        status, _, errors = run.finish()
        assert (status, errors) == (expected, ["lp_pipe: interrupted"])


def test_ctrl_c_ends_an_agent_that_somebody_has_started_by_hand(folder: Path) -> None:
    """Regression: the agent ignored Ctrl+C, as agents do that an engine has started, whose launcher gets it."""
    secret = folder / "secret"
    secret.write_bytes(generate_credentials().to_bytes())
    secret.chmod(0o600)
    keyboard, terminal = os.openpty()
    with socket.create_server(("127.0.0.1", 0)) as launcher:
        join = f"--join=127.0.0.1:{launcher.getsockname()[1]}"
        command = [*COMMAND, "agent", join, f"--token-file={secret}", f"--patience={2 * PATIENCE_S}"]
        agent = subprocess.Popen(command, stdin=terminal, stderr=subprocess.PIPE, text=True)
        launcher.settimeout(PATIENCE_S)
        with launcher.accept()[0]:
            agent.send_signal(signal.SIGINT)
            assert agent.communicate(timeout=PATIENCE_S)[1] == "lp_pipe: interrupted\n"
    assert agent.returncode == 130
    os.close(keyboard)
    os.close(terminal)
