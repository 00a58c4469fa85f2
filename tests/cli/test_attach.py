"""Debuggers of nodes: `lp_pipe attach`, and the launcher's own terminal."""

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from tests.cli.commands import COMMAND, PATIENCE_S, Command, Start

PROMPT = re.compile(rb"(?<!\] )\(Pdb\) ")  # without a label: the debugger's own, and not the log's
STOPS_TWICE = """
import lp_pipe as lp

def work():
    for step in range(2):
        breakpoint()
        print("did step", step)

program = lp.Program("debugged")
with program.group("x"):
    for _ in range(2):
        program.add_node(lp.PyNode(work))
"""


@pytest.fixture(autouse=True)
def own_state(folder: Path, monkeypatch: pytest.MonkeyPatch, socket_home: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    (folder / "debugged.py").write_text(STOPS_TWICE)


def test_attach_talks_to_the_node_that_is_named(start: Start, brief_command: Command, folder: Path) -> None:
    started = start("launch", "debugged.py", "--run-dir=out", "--json")
    said = {started.wait_for("waits in a debugger").partition("lp_pipe attach ")[2].split('"')[0] for _ in range(2)}
    assert said == {"out x/0", "out x/1"}
    which = brief_command("attach")
    assert which.returncode == 2 and ": x/0 at " in which.stderr and "; x/1 at " in which.stderr
    wrong = brief_command("attach", "out", "x/7")
    assert wrong.returncode == 2 and "node x/7" in wrong.stderr and "waiting: x/0 at" in wrong.stderr
    for arguments in (["out", "x/0"], ["x/1"]):
        attached = subprocess.run(
            [*COMMAND, "attach", *arguments],
            input="p step\nc\np step\nc\n",
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert (attached.returncode, attached.stderr) == (0, "")
        assert "(Pdb) 0\n" in attached.stdout and "(Pdb) 1\n" in attached.stdout
        assert attached.stdout.endswith("lp_pipe attach: the node's process has ended\n")
    assert started.finish()[0] == 0
    assert "ended" in brief_command("attach", "out").stderr or brief_command("attach", "out").returncode == 2


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_the_launcher_s_terminal_is_lent_to_one_debugger_after_the_other(folder: Path, mode: str) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "launch", "debugged.py", "--run-dir=out", f"--mode={mode}"],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"},
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # a session's first one is its terminal
    )
    os.close(theirs)
    output, answered = b"", 0
    while True:
        try:
            output += os.read(ours, 65536)
        except OSError:  # how Linux tells that the last writer of a terminal is gone
            break
        prompts = len(PROMPT.findall(output))
        if prompts > answered:
            answered = prompts
            os.write(ours, b"c\n")
    os.close(ours)
    assert process.wait(PATIENCE_S) == 0
    text = output.decode()
    assert answered == 4
    assert text.count("did step 0") == 2 and text.count("did step 1") == 2
    assert "done in " in text.rstrip().splitlines()[-1]
