"""The surroundings of nodes on another host."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Each line is for a process of its own: who has become another user stays that.
AS_ANOTHER_USER = """
import os, sys
from lp_pipe.launch.plan.surroundings import Surroundings
for line in sys.stdin:
    launchers, own, os.environ["HOME"] = line.split()
    os.chdir(own)
    if os.fork() == 0:
        if os.geteuid() == 0:  # only now: the interpreter may be closed to others
            os.setgroups([]), os.setgid(65532), os.setuid(65532)
        print(Surroundings({}, launchers, (), (), 0).on_this_host().cwd, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder that other users may enter."""
    with tempfile.TemporaryDirectory(prefix="lp-cwd-", dir="/tmp") as made:
        os.chmod(made, 0o755)
        yield Path(made)


def test_nodes_run_where_they_may_enter(folder: Path) -> None:
    """A launcher in root's home, and an image that has such a folder for root alone: nodes could not start."""
    opened, closed, home = (folder / name for name in ("opened", "closed", "home"))
    for one in (opened, closed, home):
        one.mkdir(mode=0o755)
    closed.chmod(0o600)
    # Of the launcher, of the agent, and the agent's home: where nodes run.
    expected = {
        (opened, home, home): opened,
        (closed, opened, home): opened,
        (folder / "nothing", opened, home): opened,
    }
    if os.geteuid() == 0:  # nobody else can be in a folder that is closed
        expected |= {(closed, closed, home): home, (closed, closed, closed): Path("/")}
    told = "".join(f"{launchers} {own} {at_home}\n" for launchers, own, at_home in expected)
    command = [sys.executable, "-c", AS_ANOTHER_USER]
    done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [str(one) for one in expected.values()]
