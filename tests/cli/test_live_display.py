"""The live display, on a terminal."""

import os
import pty
import re
import signal
import subprocess
from pathlib import Path

from tests.cli.commands import COMMAND, PATIENCE_S

PROGRAM = """
import lp_pipe as lp

def train():
    for step in range(1, 4):
        print("did step", step)
        lp.log_metrics({"loss": 1 / step, "total_steps": 3}, step=step)
    lp.stop()

program = lp.Program("demo")
program.add_node(lp.PyNode(train), label="trainer")
with program.group("waiters"):
    for _ in range(20):
        program.add_node(lp.PyNode(lp.wait_for_stop))
"""


def test_a_terminal_shows_nodes_states_metrics_and_progress_below_the_log(folder: Path) -> None:
    (folder / "demo.py").write_text(PROGRAM)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(
        [*COMMAND, "launch", "demo.py", "--mode=thread"], cwd=folder, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    output = _read_to_the_end(ours)
    assert process.wait(PATIENCE_S) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    assert text.startswith("demo: 21 nodes in 2 groups")
    assert "[trainer/0] did step 3" in text
    last_panel = text[text.rindex("╭─ demo · thread mode") :]
    assert re.search(r"trainer/0 +stopped +\d+ +step.3 +loss.0\.3333", last_panel)
    assert re.search(r"waiters x 20 +20 stopped", last_panel)
    assert re.search(r"trainer/0 ━+ 3/3", last_panel)
    assert last_panel.splitlines()[-1].startswith("done in ")


def _read_to_the_end(descriptor: int) -> str:
    chunks = []
    while True:
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:  # how Linux tells that the last writer of a terminal is gone
            chunk = b""
        if not chunk:
            os.close(descriptor)
            return b"".join(chunks).decode()
        chunks.append(chunk)


def test_an_unfinished_line_stands_in_the_table_until_its_node_ends(folder: Path) -> None:
    """A bar was not to be seen before its newline."""
    (folder / "bar.py").write_text(
        "import lp_pipe as lp\n"
        "def work():\n"
        "    print('\\rstep 1', '\\rstep 2', end='', flush=True)\n"
        "    lp.wait_for_stop()\n"
        "program = lp.Program('bar')\n"
        "program.add_node(lp.PyNode(work), label='worker')\n"
    )
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    command = [*COMMAND, "launch", "bar.py", "--run-dir=out"]
    process = subprocess.Popen(command, cwd=folder, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    while not re.search(rb"\xe2\x94\x82\x1b\[0m \[worker/0\] step 2 +", seen):
        seen += os.read(ours, 65536)  # until the test's time is up
    process.send_signal(signal.SIGINT)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", _read_to_the_end(ours))
    assert process.wait(PATIENCE_S) == 130
    assert re.search(r"[\r\n]\[worker/0\] step 2 *[\r\n]", text)  # a line by itself
    assert "step 2" not in text[text.rindex("╭─ bar") :]
    assert (folder / "out/logs/worker-0.log").read_text() == "step 2\n"
