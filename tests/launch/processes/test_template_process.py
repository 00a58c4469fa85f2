"""The template process, on its own."""

import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import lp_pipe as lp
from lp_pipe.launch.processes import template
from lp_pipe.launch.processes.template_process import send_message


def test_a_template_whose_launcher_died_before_it_was_up_removes_the_runs_folder(tmp_path: Path) -> None:
    # An agent that was killed just after its start left its folder of sockets.
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait()
    folder = tmp_path / "sockets"
    folder.mkdir()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        boot = (
            "import sys; from lp_pipe.launch.processes.template_process import main; fd, pid = map(int, sys.argv[1:3])"
        )
        boot += "; main(fd, pid, [], 1.0, sys.argv[3])"
        command = [sys.executable, "-c", boot, str(theirs.fileno()), str(launcher.pid), str(folder)]
        done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "the launcher ended before its template process" in done.stderr
    assert not folder.exists()


def test_the_launcher_may_have_more_open_files_than_select_takes() -> None:
    # The template's end of the socket has the number that it had in the launcher; with 1024 or more no node started.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"no more than {hard} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    ours, theirs = socket.socketpair()
    high = fcntl.fcntl(theirs, fcntl.F_DUPFD, 1500)
    try:
        with ours, theirs:
            boot = (
                f"from lp_pipe.launch.processes.template_process import main; main({high}, {os.getpid()}, [], 1.0, '')"
            )
            with subprocess.Popen([sys.executable, "-c", boot], pass_fds=[high]) as template:
                send_message(ours, {"op": "ping"})
                send_message(ours, {"op": "bye"})
                assert template.wait(60) == 0
    finally:
        os.close(high)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def live_twice(births: Path) -> None:
    with births.open("a") as file:
        file.write("born\n")
    if births.read_text() == "born\n":
        os.kill(os.getpid(), signal.SIGKILL)


class Steady:
    def pid(self) -> int:
        return os.getpid()


def ask_later(steady: Any, births: Path) -> None:
    pid = steady.pid()
    while births.read_text() != "born\nborn\n":
        assert not lp.wait_for_stop(0.01)
    assert steady.pid() == pid
    lp.stop()


def test_a_label_may_be_in_any_language(tmp_path: Path, no_leaks: None) -> None:
    # A process's name has 15 bytes: of this label's it ended within a letter, and the first node's end ended them all.
    program = lp.Program("labels")
    steady = program.add_node(lp.CourierNode(Steady), label="2модель")
    program.add_node(lp.PyNode(print), label="quick")
    with lp.launch(program, "process", run_dir=tmp_path) as run:
        client = run.client(steady)
        while run.status()["quick"][0]["state"] != "finished":
            assert client.pid() > 0
        assert run.status()["2модель"][0]["state"] == "running"


def test_a_process_that_cannot_be_started_is_one_failure_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    # It was the end of the template, and so of all nodes.
    fails_once = """
import os
forks, fork = [], os.fork
def limited():
    forks.append(0)
    if len(forks) == 4:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = limited
"""
    monkeypatch.setattr(template, "_BOOT", f"{fails_once}\n{template._BOOT}")
    births = tmp_path / "births"
    births.touch()
    program = lp.Program("short of processes")
    steady = program.add_node(lp.CourierNode(Steady), label="steady")
    program.add_node(lp.PyNode(ask_later, steady, births), label="asking")
    with program.group("flaky", on_failure="restart"):
        program.add_node(lp.PyNode(live_twice, births))
    with lp.launch(program, "process", run_dir=tmp_path / "run") as run:
        run.wait(60)
        [flaky] = run.status()["flaky"]
    # The stop may come to its second life before it has returned.
    assert flaky["state"] in ("finished", "stopped") and flaky["restarts"] == 2
    assert "could not be started: this user, or this container" in flaky["error"]


def test_a_killed_template_is_told_with_what_kills_processes(tmp_path: Path, no_leaks: None) -> None:
    # It is the largest process where nodes are small: the kernel takes it when memory runs out.
    program = lp.Program("lost")
    steady = program.add_node(lp.CourierNode(Steady), label="steady")
    run = lp.launch(program, "process", run_dir=tmp_path / "run")
    os.kill(psutil.Process(run.client(steady).pid()).ppid(), signal.SIGKILL)
    with pytest.raises(lp.NodeError, match=r"had started it ended: killed by SIGKILL \(.* when memory ran out"):
        run.wait(60)


def test_nothing_is_left_unclosed_for_python_to_warn_of(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import lp_pipe as lp\n"
        "program = lp.Program('quiet')\n"
        "program.add_node(lp.PyNode(print, 'ran'), label='node')\n"
        "lp.launch(program, 'process').wait()\n"
    )
    command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "ran" in done.stdout
