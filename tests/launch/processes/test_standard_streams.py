"""The output of nodes reaches their files, whatever has become of the launcher's own streams."""

import subprocess
import sys
from pathlib import Path

import pytest

WITHIN_S = 60.0
TALKS = """
import sys
import lp_pipe as lp

def talk():
    print("said")
    print("complained", file=sys.stderr)

{before}
program = lp.Program("talks")
program.add_node(lp.PyNode(talk), label="talker")
lp.launch(program, run_dir="run").wait()
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("before", ["", "own = open('own.txt', 'wb', buffering=0)"], ids=["", "own file"])
def test_a_script_whose_streams_are_closed_keeps_what_its_nodes_print(
    tmp_path: Path, socket_home: Path, closed: str, before: str
) -> None:
    """Python printed nothing in nodes forked from a process that had started without stdout."""
    (tmp_path / "script.py").write_text(TALKS.format(before=before))
    command = f"exec {sys.executable} script.py {closed}"
    ended = subprocess.run(command, shell=True, cwd=tmp_path, timeout=WITHIN_S, check=False)
    assert ended.returncode == 0
    assert (tmp_path / "run/logs/talker-0.log").read_text().splitlines() == ["said", "complained"]
    if before:
        assert (tmp_path / "own.txt").read_bytes() == b""
