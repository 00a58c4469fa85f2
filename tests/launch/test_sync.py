"""`launch(..., sync=DIR)`: nodes on other hosts run with a copy of the user's sources."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lp_pipe as lp

pytestmark = pytest.mark.usefixtures("no_leaks")

_TRAIN = """
import logging
import os
import sys
from pathlib import Path

import lp_pipe as lp
from mylib import where

class Node:
    def found(self):
        import mylib.late  # nobody has imported it in the launcher
        return where.__file__, mylib.late.TEXT, os.getcwd(), Path("data.txt").read_text(), where.Thing

def make_program():
    program = lp.Program("sync")
    program.add_node(lp.CourierNode(Node), label="node")
    return program

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with lp.launch(make_program(), "multi_host", hosts="1", sync=sys.argv[1]) as run:
        *found, thing = run.client("node").found()
        print(*found, thing is where.Thing, sep="\\n")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    files = {"train.py": _TRAIN, "src/mylib/__init__.py": "", "src/mylib/late.py": "TEXT = 'late'", "data.txt": "one"}
    for name, text in {**files, "src/mylib/where.py": "class Thing: pass"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(project: Path) -> tuple[list[str], str]:
    environment = {**os.environ, "PYTHONPATH": f"{project / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "train.py", "."]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines(), done.stderr


def test_nodes_import_and_read_their_hosts_copy_and_only_changes_travel(project: Path) -> None:
    (file, late, folder, data, is_same_class), log = run(project)
    store = os.environ["XDG_CACHE_HOME"]
    assert folder.startswith(store)
    assert file == f"{folder}/src/mylib/where.py"
    assert (late, data, is_same_class) == ("late", "one", "True")
    assert "lacked 5 of 5 source files" in log

    (project / "data.txt").write_text("other")
    (_, _, folder_after, data, _), log = run(project)
    assert folder_after != folder
    assert data == "other"
    assert "lacked 1 of 5 source files (5 bytes)" in log


def test_a_host_that_cannot_keep_the_sources_ends_the_launch_with_its_name(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # also of the agents that are started from here
    program = lp.Program("sync")
    program.add_node(lp.PyNode(print), label="node")
    named = r"host 'local0' has not got the sources of .*project: cannot keep sources below .*file"
    with pytest.raises(lp.LaunchError, match=named):
        lp.launch(program, "multi_host", hosts="2", sync=project)


def test_only_several_hosts_need_it(project: Path) -> None:
    program = lp.Program("sync")
    program.add_node(lp.PyNode(print), label="node")
    with pytest.raises(ValueError, match="sync"):
        lp.launch(program, "process", sync=project)
