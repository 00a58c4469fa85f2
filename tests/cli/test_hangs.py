"""`lp_pipe launch` says why nothing moves; `status` shows it from another terminal."""

import re
from pathlib import Path

import pytest

from tests.cli.commands import Command, Start

PROGRAM = """
import sys
import lp_pipe as lp

class Peer:
    def __init__(self, other):
        self._other = other

    def call_next(self):
        return self._other.call_next()

def begin(peer):
    lp.list_methods(peer)
    print("begins")
    peer.call_next()

program = lp.Program("ring")
nodes = [lp.CourierNode(Peer, courier_kwargs={"thread_pool_size": 1}) for _ in range(2)]
with program.group("ring"):
    handles = [program.add_node(node) for node in nodes]
for index, node in enumerate(nodes):
    node.configure(handles[1 - index])
program.add_node(lp.PyNode(begin, handles[0]), label="starter")
"""


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_launch_prints_a_deadlock_and_status_shows_the_waits(
    folder: Path, start: Start, brief_command: Command, mode: str, monkeypatch: pytest.MonkeyPatch, socket_home: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    (folder / "ring.py").write_text(PROGRAM)
    run = start("launch", "ring.py", f"--mode={mode}", "--hang-after=0.5", "--run-dir=out", "--grace=0.1")
    run.wait_for("begins")
    assert run.process.stderr is not None
    errors = ""
    while "To see every stack: lp_pipe stacks out." not in errors:
        line = run.process.stderr.readline()
        assert line, errors
        errors += line
    assert "deadlock: these waits are for each other" in errors
    assert re.search(r"ring/0 waits for ring/1\.call_next\(\) since .* \(at ring\.py:10 in call_next\)", errors)
    assert re.search(r"ring/1 waits for ring/0\.call_next\(\) since .* \(at ring\.py:10 in call_next\)", errors)
    assert "deadlock: these waits" in (folder / "out" / "hangs.log").read_text()
    table = brief_command("status", "out").stdout
    assert re.search(r"WAITING\nring/0 +running .* for a reply of ring/1\.call_next\(\)\n", table), table
    assert brief_command("stop", "out").returncode == 0
    assert run.finish()[0] == 0


def test_the_limit_must_be_a_number_of_seconds_or_never(brief_command: Command) -> None:
    for wrong in ("0", "-1", "soon"):
        done = brief_command("launch", "ring.py", f"--hang-after={wrong}")
        assert done.returncode == 2
        assert f"--hang-after={wrong}: " in done.stderr
