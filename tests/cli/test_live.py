"""The live display, on a terminal."""

import os
import pty
import re
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
