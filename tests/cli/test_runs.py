"""A running program, asked from another terminal: status, stop, stacks, logs, ps, clean."""

import contextlib
import json
import os
import pickle
import pty
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lp_pipe import connections
from lp_pipe.cli import find_run as runs
from lp_pipe.cli.errors import UsageError
from lp_pipe.connections import Frame, frames
from lp_pipe.launch import run_records
from lp_pipe.launch.run_records import Entry, Outcome, RunRecord, entries
from lp_pipe.process_tree import start_time
from tests.cli.commands import COMMAND, PATIENCE_S, Command, Start, Started, is_alive
from tests.connections.payloads import Mark
from tests.waiting import until

WAITING = """
import os
import lp_pipe as lp

def wait():
    print("pid", os.getpid())
    lp.wait_for_stop()

program = lp.Program("waiting")
with program.group("nodes"):
    for _ in range(2):
        program.add_node(lp.PyNode(wait))
"""


@pytest.fixture(autouse=True)
def own_state(folder: Path, monkeypatch: pytest.MonkeyPatch, socket_home: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    (folder / "waiting.py").write_text(WAITING)


@pytest.fixture(params=["thread", "process"])
def launched(request: pytest.FixtureRequest, start: Start) -> Started:
    """`waiting.py` in the folder `out`, up in either mode."""
    run = start("launch", "waiting.py", "--run-dir=out", f"--mode={request.param}")
    run.pids(2)
    return run


@pytest.fixture
def in_processes(start: Start) -> Started:
    run = start("launch", "waiting.py", "--run-dir=out")
    run.pids(2)
    return run


@pytest.fixture
def dead(start: Start) -> Iterator[tuple[RunRecord, subprocess.Popen[bytes]]]:
    """A run whose launcher and template were killed, and a process that it has left behind."""
    run = start("launch", "waiting.py", "--run-dir=out")
    pids = run.pids(2)
    (record,) = entries().values()
    left = subprocess.Popen(["sleep", "1000"], env={**os.environ, "LP_PIPE_TEMPLATE": record.mark})
    template = psutil.Process(pids["nodes/0"]).parent()
    assert template is not None
    template.send_signal(signal.SIGSTOP)  # or it would clean up
    run.process.kill()
    run.process.wait()
    template.kill()
    family = [template]
    for pid in pids.values():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with its template
            family.append(psutil.Process(pid))
    psutil.wait_procs(family, timeout=10)
    yield record, left
    left.kill()
    left.wait()


def test_status_is_a_table_of_the_nodes(launched: Started, brief_command: Command, folder: Path) -> None:
    done = brief_command("status")
    assert (done.returncode, done.stderr) == (0, "")
    first, head, *rows = done.stdout.splitlines()
    assert first.startswith("waiting in ")
    assert first.endswith("folder out")
    assert head.split() == ["NODE", "STATE", "PID", "UP", "RESTARTS"]
    assert [row.split()[:2] for row in rows] == [["nodes/0", "running"], ["nodes/1", "running"]]
    answer = json.loads(brief_command("status", "out", "--json").stdout)
    assert (answer["program"], answer["run_dir"], answer["pid"]) == (
        "waiting",
        str(folder / "out"),
        launched.process.pid,
    )
    assert [(node["node"], node["state"]) for node in answer["nodes"]] == [
        ("nodes/0", "running"),
        ("nodes/1", "running"),
    ]


def test_a_node_without_a_process_has_no_number(start: Start, brief_command: Command, folder: Path) -> None:
    # It was 0, with which `kill -9 $(lp_pipe status --json | jq …)` ends the shell that it is in.
    source = WAITING.replace('group("nodes"', 'group("nodes", on_failure="restart", max_restarts=1000')
    (folder / "failing.py").write_text(source.replace("lp.wait_for_stop()", "raise ValueError"))
    start("launch", "failing.py", "--run-dir=out").wait_for("run folder")

    def restarting() -> list[dict[str, Any]]:
        nodes = json.loads(brief_command("status", "out", "--json").stdout or '{"nodes": []}')["nodes"]
        return [node for node in nodes if node["state"] == "restarting" and not node["pid"]]

    assert until(restarting)[0]["pid"] is None


def test_status_says_on_which_host_each_node_is_where_there_are_several(start: Start, brief_command: Command) -> None:
    # A process's number alone said nothing.
    run = start("launch", "waiting.py", "--run-dir=out", "--mode=multi_host", "--hosts=2")
    run.pids(2)
    head, *nodes = brief_command("status").stdout.splitlines()[1:]
    assert head.split()[:4] == ["NODE", "STATE", "HOST", "PID"]
    assert [line.split()[2] for line in nodes] == ["local0", "local1"]


def test_stop_ends_the_program_in_order_and_waits_for_it(launched: Started, brief_command: Command) -> None:
    done = brief_command("stop", "ou")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("run out ended in ")
    assert done.stdout.endswith("s; nodes: 2 stopped\n")
    status, lines, errors = launched.finish()
    assert (status, errors) == (0, [])
    assert lines[-1].startswith("done in ")
    again = brief_command("stop", "out")
    assert again.returncode == 2
    assert again.stderr.startswith("lp_pipe: run out ended ")
    assert again.stderr.endswith("; its logs: lp_pipe logs out\n")


def test_what_is_said_of_a_run_that_has_ended_can_be_copied_and_is_true(folder: Path, command: Command) -> None:
    (folder / "quiet.py").write_text(
        "import lp_pipe as lp\nprogram = lp.Program('quiet')\nprogram.add_node(lp.PyNode(int), label='node')\n"
    )
    assert command("launch", "quiet.py", "--run-dir=my run").returncode == 0
    assert command("status", "my run").stderr.endswith("; its logs: lp_pipe logs 'my run'\n")
    assert command("logs", "my run").stderr == "lp_pipe: no node of run my run has printed anything\n"


def test_a_run_that_ends_in_order_as_it_is_looked_for_is_not_said_to_be_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_now(pid: int) -> int:
        entry.end(time.time(), Outcome("done", 0))
        return 0

    out = folder / "out"
    out.mkdir()
    facts = {"program": "demo", "mode": "thread", "run_dir": str(out), "host": socket.gethostname()}
    process = {"pid": os.getpid(), "pid_started": start_time(os.getpid()), "started": time.time()}
    entry = Entry(RunRecord(**facts, **process, control="unix:/tmp/lp-x/control", socket_dir="/tmp/lp-x"))
    monkeypatch.setattr(runs, "live_runs", list)
    monkeypatch.setattr(run_records, "start_time", end_now)  # asked for once the record has been read
    with pytest.raises(UsageError, match=r"^run out ended .* ago, after "):
        runs.find_live_run(str(out))


def test_stop_without_a_run_ends_none_that_was_launched_elsewhere(
    launched: Started, brief_command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it ended the user's only live run, wherever that had been launched."""
    (folder / "elsewhere").mkdir()
    there = [*COMMAND, "stop"]
    done = subprocess.run(there, cwd=folder / "elsewhere", capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert [line.split()[0] for line in done.stderr.splitlines()[1:]] == ["RUN", "out"]
    assert launched.process.poll() is None
    assert brief_command("stop").stdout.startswith("run out ended in ")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="terminals are told apart by /proc")
def test_stop_without_a_run_ends_the_one_of_this_terminal(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    lp_pipe = shlex.join(COMMAND)
    script = f"{lp_pipe} launch waiting.py --mode=thread --run-dir=out & until grep -qs ready out/events.jsonl || "
    script += f"grep -qs '1\"' out/events.jsonl; do sleep 0.1; done; cd elsewhere; {lp_pipe} stop; echo status $?; wait"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("sh", ["sh", "-c", script])
    output = b""
    with contextlib.suppress(OSError), open(terminal, "rb", buffering=0) as file:  # EIO: all have ended
        while piece := file.read(4096):
            output += piece
    os.waitpid(pid, 0)
    assert b"run out ended in" in output and b"status 0" in output


def test_runs_lists_how_each_has_ended(
    dead: tuple[RunRecord, "subprocess.Popen[bytes]"], command: Command, brief_command: Command, folder: Path
) -> None:
    (folder / "failing.py").write_text(WAITING.replace("lp.wait_for_stop()", "raise ValueError('no more')"))
    assert command("launch", "failing.py", "--mode=thread").returncode == 1
    head, failed, killed = brief_command("runs").stdout.splitlines()
    assert head.split() == ["PROGRAM", "MODE", "STARTED", "TOOK", "EXIT", "ENDED", "FOLDER"]
    assert "1     failed: node nodes/" in failed and "ValueError: no more" in failed and "  runs/waiting-" in failed
    assert "  killed, no end recorded  " in killed and killed.endswith("  out")
    assert brief_command("runs", "-n", "1").stdout.splitlines()[1].split() == failed.split()
    (one,) = (json.loads(line) for line in brief_command("runs", "out", "--json").stdout.splitlines())
    assert (one["state"], one["ended"], one["flags"]["options"]) == ("killed", None, {})
    assert one["argv"] == ["lp_pipe", "launch", "waiting.py", "--run-dir=out"]
    assert brief_command("runs", "nowhere").returncode == 2


def test_clean_removes_old_runs_when_asked(command: Command, brief_command: Command, folder: Path) -> None:
    (folder / "brief.py").write_text(WAITING.replace("lp.wait_for_stop()", "pass"))
    assert command("launch", "brief.py", "--mode=thread").returncode == 0
    (path,) = (folder / "runs").iterdir()
    assert "removed 0 old runs" in brief_command("clean", "--runs=runs").stdout
    assert path.name in brief_command("clean", "--runs=runs", "--keep=0", "--dry-run").stdout
    assert path.exists()
    assert path.name in brief_command("clean", "--runs=runs", "--keep=0").stdout
    assert not path.exists()
    for wrong in ["--keep=3"], ["--runs", "--keep=few"], ["--runs=nowhere"]:
        assert brief_command("clean", *wrong).returncode == 2


def test_logs_are_found_by_any_label(command: Command, brief_command: Command, folder: Path) -> None:
    (folder / "labels.py").write_text(
        "import lp_pipe as lp\nprogram = lp.Program('x')\n"
        "for label in ('a/b', 'a-b', 'B' * 252):\n"
        "    program.add_node(lp.PyNode(lambda label=label: print('I am', label[:3])), label=label)\n"
    )
    assert command("launch", "labels.py", "--run-dir=out").returncode == 0
    for label in ("a/b", "a-b", "B" * 252):
        assert brief_command("logs", "out", f"{label}/0").stdout == f"I am {label[:3]}\n"
        assert brief_command("logs", "out", label).stdout == f"[{label}/0] I am {label[:3]}\n"
    assert len(list((folder / "out" / "logs").iterdir())) == 3


def test_stacks_show_where_every_node_is(launched: Started, brief_command: Command) -> None:
    done = brief_command("stacks")
    assert done.returncode == 0
    assert "node nodes/0" in done.stdout
    assert done.stdout.count("lp.wait_for_stop()") == 2
    assert "File" not in done.stdout and len(done.stdout.splitlines()) <= 2 * 5
    every = brief_command("stacks", "--all")
    assert every.stdout.count("lp.wait_for_stop()") == 2 and "lp_pipe/context.py" in every.stdout


def test_logs_of_one_node_of_the_only_live_run(in_processes: Started, brief_command: Command) -> None:
    both = brief_command("logs").stdout.splitlines()
    assert brief_command("logs", "nodes").stdout.splitlines() == both
    assert brief_command("logs", "nodes/1").stdout == both[1].removeprefix("[nodes/1] ") + "\n"
    wrong = brief_command("logs", "node")
    assert wrong.returncode == 2 and "no run 'node'" in wrong.stderr


def test_logs_have_labels_though_one_node_only_has_printed(start: Start, brief_command: Command, folder: Path) -> None:
    (folder / "waiting.py").write_text(WAITING.replace('print("pid"', 'lp.context().index or print("pid"'))
    start("launch", "waiting.py", "--run-dir=out").pids(1)
    (only,) = brief_command("logs", "out").stdout.splitlines()
    assert only.startswith("[nodes/0] pid ")
    assert brief_command("logs", "nodes/1").stderr.startswith("lp_pipe: node 'nodes/1' of run out has printed nothing")


def test_logs_of_a_live_run_and_of_one_that_has_ended(in_processes: Started, brief_command: Command) -> None:
    both = brief_command("logs").stdout.splitlines()
    assert [line[:14] for line in both] == ["[nodes/0] pid ", "[nodes/1] pid "]
    brief_command("stop")
    assert brief_command("logs", "out", "nodes").stdout.splitlines() == both
    assert brief_command("logs", "out", "nodes/1").stdout == both[1].removeprefix("[nodes/1] ") + "\n"
    assert brief_command("logs", "out", "-n", "0").stdout == ""
    missing = brief_command("logs", "out", "node/1")
    assert missing.returncode == 2
    assert "did you mean 'nodes/1'? (nodes: nodes/0, nodes/1)" in missing.stderr


def test_logs_are_followed_until_the_run_ends(start: Start, brief_command: Command, folder: Path) -> None:
    (folder / "talking.py").write_text(
        "import pathlib, lp_pipe as lp\n"
        "def talk():\n"
        "    print('before', flush=True)\n"
        "    while not pathlib.Path('go').exists() and not lp.wait_for_stop(0.01): pass\n"
        "    print('after')\n"
        "    print('unfinished', end='')\n"
        "program = lp.Program('talking')\n"
        "program.add_node(lp.PyNode(talk), label='talker')\n"
    )
    run = start("launch", "talking.py", "--run-dir=out")
    run.wait_for("before")
    following = start("logs", "out", "-f")
    following.wait_for("before")
    (folder / "go").write_text("")
    following.wait_for("after")
    following.wait_for("unfinished")
    assert following.finish() == (0, [], [])
    assert run.finish()[0] == 0


def test_thread_mode_has_no_log_files_and_says_so(start: Start, brief_command: Command) -> None:
    start("launch", "waiting.py", "--mode=thread").pids(2)
    done = brief_command("logs")
    assert done.returncode == 2
    assert "thread mode" in done.stderr


def test_of_several_runs_one_must_be_named(start: Start, brief_command: Command) -> None:
    for name in ("first", "fifth"):
        start("launch", "waiting.py", "--mode=thread", f"--run-dir={name}").pids(2)
    done = brief_command("status")
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[0] == "lp_pipe: 2 runs of yours are live; name one:"
    assert [line.split()[0] for line in lines[1:]] == ["RUN", "first", "fifth"]
    assert brief_command("status", "fi").stderr.startswith(
        "lp_pipe: 'fi' matches 2 runs; give more of the name, or a folder:\n"
    )
    assert brief_command("status", "frist").stderr.startswith("lp_pipe: no run 'frist'; did you mean 'first'?")
    assert brief_command("status", "fir").stdout.splitlines()[0].endswith("folder first")
    assert [line.split()[0] for line in brief_command("ps").stdout.splitlines()] == ["RUN", "first", "fifth"]
    assert [json.loads(line)["name"] for line in brief_command("ps", "--json").stdout.splitlines()] == [
        "first",
        "fifth",
    ]


def test_without_a_run_everything_says_so(brief_command: Command, folder: Path) -> None:
    for name in ("status", "stop", "stacks", "logs"):
        done = brief_command(name)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith("lp_pipe: no run of yours is live on this host")
    assert "it has no run.json" in brief_command("status", str(folder)).stderr
    # A path that is not there ended in a NotImplementedError of pathlib's.
    assert brief_command("logs", "/no/run").stderr.startswith("lp_pipe: no run '/no/run': there is no such folder")
    assert (brief_command("ps").stdout, brief_command("ps").returncode) == ("", 0)
    assert brief_command("clean").stdout.startswith("nothing to clean: ")


def test_a_run_that_has_ended_is_found_by_its_name_and_where_it_was_moved_to(
    in_processes: Started, brief_command: Command, folder: Path
) -> None:
    brief_command("stop")
    both = brief_command("logs", "out").stdout
    (folder / "runs").mkdir()
    (folder / "out").rename(folder / "runs" / "waiting-1")
    for name in "runs/waiting-1", "waiting-1":
        assert brief_command("logs", name).stdout == both != ""
    for arguments in ("logs",), ("status",), ("logs", "wait"):
        assert brief_command(*arguments).stderr == (
            "lp_pipe: no run of yours is live on this host; the newest that has ended: lp_pipe logs runs/waiting-1\n"
        )


def test_clean_removes_what_a_killed_run_has_left_and_nothing_else(
    dead: tuple[RunRecord, "subprocess.Popen[bytes]"], start: Start, brief_command: Command, folder: Path
) -> None:
    record, left = dead
    other = start("launch", "waiting.py", "--run-dir=other")
    others_pids = other.pids(2)
    assert brief_command("ps").stderr == "leftovers of killed runs: 1; remove them with: lp_pipe clean\n"
    assert f"its launcher, process {record.pid}, was killed" in brief_command("status", "out").stderr
    dry = brief_command("clean", "--dry-run").stdout
    assert dry == (
        f"run out, whose launcher {record.pid} is dead: would kill 1 process ({left.pid}), "
        f"would remove {record.socket_dir}, would remove its entry\n"
    )
    assert left.poll() is None
    assert brief_command("clean").stdout == dry.replace("would kill", "killed").replace("would remove", "removed")
    assert left.wait(10) == -signal.SIGKILL
    assert not Path(record.socket_dir).exists()
    assert "nothing to clean" in brief_command("clean").stdout
    assert (folder / "out" / "logs").is_dir()
    assert all(is_alive(pid) for pid in others_pids.values())
    assert brief_command("status").stdout.splitlines()[0].endswith("folder other")


def test_a_launcher_that_hangs_is_named(in_processes: Started, brief_command: Command) -> None:
    os.kill(in_processes.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    done = brief_command("status")
    assert time.monotonic() - began < 30
    assert done.returncode == 1
    assert f"`kill -9 {in_processes.process.pid}`" in done.stderr


def test_a_run_of_another_host_is_not_judged(folder: Path, brief_command: Command) -> None:
    (folder / "far").mkdir()
    record = RunRecord("demo", "process", str(folder / "far"), f"not-{socket.gethostname()}", 1, 1, 0.0, "unix:x", "x")
    (folder / "far" / "run.json").write_text(json.dumps(vars(record)))
    done = brief_command("stop", "far")
    assert (done.returncode, done.stderr) == (
        2,
        f"lp_pipe: run far is on host not-{socket.gethostname()}: run this command there\n",
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start another user's process")
def test_a_run_of_another_user_is_named_as_such(folder: Path, brief_command: Command) -> None:
    # "has just ended, or does not listen: … Permission denied"
    with subprocess.Popen(["sleep", "60"], user=65534) as his:
        (folder / "his").mkdir()
        here = (socket.gethostname(), his.pid, start_time(his.pid))
        record = RunRecord("demo", "process", "his", *here, time.time(), "unix:/tmp/lp-his/control", "/tmp/lp-his")
        (folder / "his" / "run.json").write_text(json.dumps(vars(record)))
        done = brief_command("stop", "his")
        his.kill()
    assert done.returncode == 2
    assert done.stderr == "lp_pipe: run his is another user's: only that user can query or stop it\n"


def test_a_folder_that_somebody_else_has_made_gets_nobody_to_unpickle_what_he_answers(
    folder: Path, brief_command: Command
) -> None:
    # A client believes whom it calls, and over gRPC on one host that may be another user.
    mark = folder / "mark"

    def answer(connection: connections.Connection) -> None:
        bomb = pickle.dumps(Mark(mark))
        connection.start(lambda call: connection.send(Frame(frames.RESULT, call.id, body=bomb)), lambda why: None)

    with contextlib.closing(connections.listen("grpc:127.0.0.1:0#his", answer)) as his:
        (folder / "his").mkdir()
        here = (socket.gethostname(), os.getpid(), start_time(os.getpid()))
        record = RunRecord("demo", "process", "his", *here, time.time(), his.endpoint, "/tmp/lp-his")
        (folder / "his" / "run.json").write_text(json.dumps(vars(record)))
        done = brief_command("status", "his")
    assert not mark.exists()
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("mode", [pytest.param("thread", marks=pytest.mark.slow), "process"])
def test_a_colocation_of_processes_is_one_node_with_the_logs_and_stacks_of_all(
    mode: str, start: Start, brief_command: Command, folder: Path
) -> None:
    source = WAITING.replace("program.add_node(lp.PyNode(wait))", "pass")
    source += "program.add_node(lp.MultiProcessingColocation([lp.PyNode(wait), lp.PyNode(wait)]), label='both')\n"
    (folder / "colocated.py").write_text(source)
    run = start("launch", "colocated.py", "--run-dir=out", f"--mode={mode}")
    pids = run.pids(2)
    (row,) = json.loads(brief_command("status", "--json").stdout)["nodes"]
    assert (row["node"], row["state"], row["pid"]) == ("both/0", "running", pids["both/0.0"])
    stacks = brief_command("stacks").stdout
    assert "node both/0.0\n" in stacks
    assert "node both/0.1\n" in stacks
    logs = brief_command("logs").stdout.splitlines()
    assert [line.partition(" pid ")[0] for line in logs] == ["[both/0.0]", "[both/0.1]"]
    assert brief_command("logs", "out", "both").stdout.splitlines() == logs
    assert brief_command("logs", "out", "both/0").stdout.splitlines() == logs
    assert brief_command("logs", "out", "both/0.1").stdout == logs[1].removeprefix("[both/0.1] ") + "\n"
    assert brief_command("stop").returncode == 0
    assert not any(is_alive(pid) for pid in pids.values())
