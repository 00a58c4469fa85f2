"""`lp_pipe launch`: what it prints, and how it ends."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cli.commands import Command, Start, is_alive

DEMO = """
import sys
import lp_pipe as lp

class Adder:
    def add(self, a, b):
        if b > 1:
            raise ValueError("more than I can count")
        return a + b

def use(adder, last):
    for step in range(last + 1):
        lp.log_metrics({"sum": adder.add(step, step)}, step=step)
    print("all added")
    lp.stop()

def make_program(last=1):
    program = lp.Program("demo")
    adder = program.add_node(lp.CourierNode(Adder), label="adder")
    program.add_node(lp.PyNode(use, adder, last), label="user")
    return program

def failing():
    return make_program(last=2)

def with_arguments_of_the_command():
    return make_program(last=int(sys.argv[1]))

def unpicklable():
    program = lp.Program("demo")
    program.add_node(lp.PyNode(print, sys._getframe()), label="printer")
    return program

def empty():
    return lp.Program("empty")
"""


@pytest.fixture(autouse=True)
def demo(folder: Path) -> None:
    (folder / "demo.py").write_text(DEMO)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")
def test_a_run_goes_on_without_its_picture(command: Command, folder: Path) -> None:
    """Regression: on a full disk the run was stopped, with "cannot print: No space left on device"."""
    (folder / "here").mkdir()
    (folder / "here" / "graph.svg").symlink_to("/dev/full")
    done = command("launch", "demo.py", "--mode=thread", "--run-dir=here")
    assert done.returncode == 0
    assert f"{folder}/here/graph.svg (No space left on device)" in done.stderr
    assert "all added" in done.stdout


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_run_shows_graph_folder_logs_and_metrics_and_ends_with_0(mode: str, command: Command, folder: Path) -> None:
    done = command("launch", "demo.py", f"--mode={mode}")
    assert (done.returncode, done.stderr) == (0, "")
    (run_dir,) = (folder / "runs").iterdir()
    lines = done.stdout.splitlines()
    assert lines[:5] == [
        "demo: 2 nodes in 2 groups (→ holds a handle of)",
        "  adder  CourierNode  Adder",
        "  user   PyNode       use    → adder",
        "",
        f"run folder runs/{run_dir.name}",
    ]
    assert {"[user/0] all added", "user/0  step 0  sum 0", "user/0  step 1  sum 2"} <= set(lines[5:-1])
    assert lines[-1].startswith("done in ")
    assert lines[-1].endswith(f"; run folder runs/{run_dir.name} (with metrics.jsonl)")


def test_a_failing_node_is_reported_in_at_most_15_lines_and_ends_with_1(command: Command, folder: Path) -> None:
    done = command("launch", "demo.py:failing", "--run-dir=out")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) <= 15
    assert lines[0].startswith(f"node user/0 on {os.uname().nodename} failed: ValueError: ")
    assert '  demo.py:8 in add:  raise ValueError("more than I can count")' in lines
    assert any("  demo.py:13 in use:  " in line for line in lines)
    assert any(line.startswith("    … ") and line.endswith("of lp_pipe") for line in lines)
    assert lines[-1] == "run folder out (with metrics.jsonl)"
    assert "Traceback" not in done.stderr


def test_arguments_after_the_dashes_are_the_programs(command: Command) -> None:
    done = command("launch", "demo:with_arguments_of_the_command", "--mode=thread", "--", "0")
    assert done.returncode == 0
    assert "step 1" not in done.stdout


def test_a_program_that_cannot_be_launched_ends_with_3_and_leaves_no_folder(
    brief_command: Command, folder: Path
) -> None:
    done = brief_command("launch", "demo.py:unpicklable")
    assert done.returncode == 3
    assert done.stderr.startswith("lp_pipe: cannot launch demo.py:unpicklable: printer/0: ")
    assert "args[0] of type frame" in done.stderr
    assert "Traceback" not in done.stderr
    assert brief_command("launch", "demo.py:empty").returncode == 3
    assert list((folder / "runs").iterdir()) == []


def test_a_target_that_raises_shows_its_own_frames_and_ends_with_3(brief_command: Command, folder: Path) -> None:
    (folder / "broken.py").write_text("def half(x):\n    return x // 0\n\nhalf(1)\n")
    for name in ("broken.py", "broken"):
        done = brief_command("launch", name)
        assert done.returncode == 3
        assert done.stderr.splitlines() == [
            f"lp_pipe: {name} raised ZeroDivisionError: integer division or modulo by zero",
            "  broken.py:4 in <module>:  half(1)",
            "  broken.py:2 in half:  return x // 0",
        ]
    (folder / "typo.py").write_text("def (x):\n")
    done = brief_command("graph", "typo.py")
    assert done.returncode == 3
    assert done.stderr.splitlines()[1] == "  typo.py:1:  def (x):"


def test_json_prints_events_and_nothing_else_on_stdout(command: Command, folder: Path) -> None:
    for mode in ("thread", "process"):
        done = command("launch", "demo.py:failing", "--json", f"--mode={mode}", f"--run-dir={mode}")
        events = [json.loads(line) for line in done.stdout.splitlines()]
        kinds = [event["event"] for event in events]
        assert kinds[0] == "graph"
        assert kinds[-3:] == ["node", "node", "failed"]
        assert "launched" in kinds
        metrics = [event for event in events if event["event"] == "metrics"]
        assert [(event["node"], event["step"], event["values"]) for event in metrics] == [
            ("user/0", 0, {"sum": 0}),
            ("user/0", 1, {"sum": 2}),
        ]
        nodes = {event["node"]: event["state"] for event in events if event["event"] == "node"}
        assert nodes == {"adder/0": "stopped", "user/0": "failed"}
        assert events[-1]["type"] == "ValueError"
        assert events[-1]["exit_status"] == done.returncode == 1
        assert events[-1]["run_dir"] == str(folder / mode)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_json_gives_every_log_line_with_its_node_and_stream(mode: str, command: Command) -> None:
    done = command("launch", "demo.py", "--json", f"--mode={mode}")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    (log,) = [event for event in events if event["event"] == "log"]
    assert (log["node"], log["stream"], log["line"]) == ("user/0", "stdout", "all added")
    assert events[-1]["event"] == "done"


def test_a_killed_node_ends_the_program_with_its_last_lines(start: Start, folder: Path) -> None:
    (folder / "waiting.py").write_text(
        "import os, lp_pipe as lp\n"
        "def wait():\n    print('about to wait')\n    print('pid', os.getpid())\n    lp.wait_for_stop()\n"
        "program = lp.Program('waiting')\n"
        "with program.group('nodes'):\n    for _ in range(3):\n        program.add_node(lp.PyNode(wait))\n"
    )
    run = start("launch", "waiting.py", "--run-dir=out")
    pids = run.pids(3)
    os.kill(pids["nodes/1"], signal.SIGKILL)
    status, _, errors = run.finish()
    assert status == 1
    assert errors[0].startswith(
        f"node nodes/1 on {os.uname().nodename} failed: ProcessDied: the process was killed by SIGKILL"
    )
    assert errors[1:] == [
        "  its last lines:",
        "    about to wait",
        f"    pid {pids['nodes/1']}",
        "  all its output: out/logs/nodes-1.log",
        "run folder out",
    ]
    assert not any(is_alive(pid) for pid in pids.values())


def test_a_run_folder_of_the_users_stays_when_the_launch_fails(brief_command: Command, folder: Path) -> None:
    (folder / "mine").mkdir()
    assert brief_command("launch", "demo.py:empty", "--run-dir=mine").returncode == 3
    assert (folder / "mine").is_dir()


def test_no_hosts_are_none(brief_command: Command, folder: Path) -> None:
    """Regression: one host was started, with the name "0"."""
    (folder / "none.py").write_text(
        "import lp_pipe as lp\nprogram = lp.Program('none')\nprogram.add_node(lp.PyNode(int), label='n')\n"
    )
    done = brief_command("launch", "none.py", "--mode=multi_host", "--hosts=0", "--dry-run")
    assert done.returncode == 3 and done.stderr.startswith("lp_pipe: cannot launch none.py: engine 'local': hosts")
    assert done.stderr.count("\n") == 1
