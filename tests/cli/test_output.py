"""Lines that nodes print, with the node that they come from."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lp_pipe.cli.output import labelled, redirected
from lp_pipe.telemetry.log_files import LogFiles
from lp_pipe.telemetry.run_folder import RunFolder
from lp_pipe.telemetry.terminal_lines import SHOW_AFTER_S, Unfinished
from tests.cli.commands import COMMAND, PATIENCE_S, Command

PRINTS_MUCH = """
import lp_pipe as lp

def talk():
    print("more than a pipe holds " * 10_000, flush=True)
    lp.stop()

def make_program():
    program = lp.Program("talks")
    program.add_node(lp.PyNode(talk), label="talker")
    return program
"""


def test_lines_of_node_processes_have_their_node_and_others_none(tmp_path: Path) -> None:
    seen: list[tuple[str, str | None, str]] = []
    files = LogFiles(RunFolder(tmp_path), ["stages/1"])
    with redirected(lambda stream, node, line: seen.append((stream, node, line))):
        files.write("stages/1", False, [b"loss 2.5", b"loss 2.4"])
        print("[stages/1] not from a node", file=sys.stderr)
    files.close()
    assert seen == [
        ("stdout", "stages/1", "loss 2.5"),
        ("stdout", "stages/1", "loss 2.4"),
        ("stderr", None, "[stages/1] not from a node"),
    ]


def test_what_a_thread_has_not_finished_is_shown_at_the_next_look_and_ends_with_the_output() -> None:
    seen: list[object] = []
    with redirected(
        lambda stream, node, line: seen.append(line), lambda stream, node, unfinished: seen.append(unfinished)
    ) as output:
        print("downloading ... ", end="")
        time.sleep(SHOW_AFTER_S)
        output.look()
        print("ok\n\rstep 1\rstep 2", end="")
    assert seen == [Unfinished(b"downloading ... ", False), "downloading ... ok", "step 2"]


def test_threads_do_not_mix_their_lines() -> None:
    seen: list[str] = []
    is_half_way, is_done = threading.Event(), threading.Event()

    def slow() -> None:
        print("slow be", end="")
        is_half_way.set()
        is_done.wait(10)
        print("gun")

    with redirected(lambda stream, node, line: seen.append(line)):
        thread = threading.Thread(target=slow)
        thread.start()
        is_half_way.wait(10)
        print("fast")
        is_done.set()
        thread.join()
    assert seen == ["fast", "slow begun"]


def test_other_lines_pass_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    with labelled():
        print("[stages/1] from a process")
        print("from the launcher")
    assert capsys.readouterr().out == "[stages/1] from a process\nfrom the launcher\n"


@pytest.mark.parametrize("options", ["", "--json", "--mode=thread"])
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_run_ends_though_who_started_it_has_closed_the_streams(folder: Path, closed: str, options: str) -> None:
    """Regression: with --json, printing an event was an event that waited for the lock of the first, for ever."""
    (folder / "talks.py").write_text(PRINTS_MUCH)
    command = f"exec {' '.join(COMMAND)} launch talks.py --run-dir=run {options} {closed}"
    ended = subprocess.run(command, shell=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0
    if "thread" not in options:
        assert (folder / "run/logs/talker-0.log").stat().st_size > 200_000


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")
@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_run_whose_output_goes_to_a_full_disk_does_what_it_does(folder: Path, mode: str) -> None:
    """Regression: without --json the run was not launched (status 3) where the disk was full from the start."""
    (folder / "talks.py").write_text(PRINTS_MUCH)
    command = f"{' '.join(COMMAND)} launch talks.py --run-dir=run --mode={mode} >/dev/full"
    ended = subprocess.run(command, shell=True, timeout=PATIENCE_S, check=False, capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert '"ended": null' not in (folder / "run/run.json").read_text()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")
def test_a_plan_that_cannot_be_printed_is_not_one_that_cannot_be_launched(folder: Path) -> None:
    (folder / "talks.py").write_text(PRINTS_MUCH)
    command = f"{' '.join(COMMAND)} launch talks.py --dry-run >/dev/full"
    ended = subprocess.run(command, shell=True, timeout=PATIENCE_S, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (3, "lp_pipe: cannot write to stdout: No space left on device\n")


@pytest.mark.parametrize("options", ["--mode=process", "--mode=thread", "--json"])
def test_a_run_goes_on_when_nobody_reads_any_more(folder: Path, options: str) -> None:
    """`| head`: in thread mode the first node that printed then failed, of a broken pipe."""
    (folder / "talks.py").write_text(PRINTS_MUCH)
    command = [*COMMAND, "launch", "talks.py", "--run-dir=run", options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stderr is not None
        assert any(b"run folder" in line or b'"launched"' in line for line in run.stdout)
        run.stdout.close()
        assert run.wait(PATIENCE_S) == 0
        assert run.stderr.read() == b""


@pytest.mark.parametrize(
    "arguments",
    ["checkpoint --help", "graph talks.py", "launch talks.py --mode=thread --run-dir=run"],
)
def test_a_terminal_without_arrows_and_dots_gets_them_escaped(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    """Regression: the commands ended with a UnicodeEncodeError, since every graph with handles has an arrow."""
    (folder / "talks.py").write_text(PRINTS_MUCH.replace("more than a pipe holds", "größer").replace("talker", "größe"))
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = command(*arguments.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xf6\\xdf" in done.stdout or "usage" in done.stdout


@pytest.mark.parametrize("ending", ["svg", "dot", "json"])
def test_what_was_written_before_stays_where_the_disk_is_full(folder: Path, ending: str) -> None:
    """Regression: the file was emptied first. A limit on the size of files stands for the disk."""
    (folder / "talks.py").write_text(PRINTS_MUCH.replace("talk()", f"talk({', '.join('abcdefgh')})"))
    (folder / f"graph.{ending}").write_text("of yesterday")
    command = f"ulimit -f 0; {' '.join(COMMAND)} graph talks.py -o graph.{ending}"
    ended = subprocess.run(command, shell=True, timeout=PATIENCE_S, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (2, f"lp_pipe: cannot write graph.{ending}: File too large\n")
    assert (folder / f"graph.{ending}").read_text() == "of yesterday"
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == [f"graph.{ending}", "talks.py"]
