"""Processes and what they started."""

import os
import subprocess
import sys

from lp_pipe.process_tree import is_dying, start_time, tree_of

_NAMED = "import ctypes; ctypes.CDLL(None).prctl(15, b'half \\xd0', 0, 0, 0); print('named', flush=True); input()"


def test_a_process_may_have_any_bytes_for_its_name() -> None:
    """Half a letter of a node's label was the end of the template, and so of all nodes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _NAMED], **pipes) as child:  # type: ignore[call-overload]
        assert child.stdout.readline() == b"named\n"
        assert child.pid in tree_of(os.getpid())
        assert start_time(child.pid) > 0
        assert not is_dying(child.pid)
        child.communicate(b"\n", timeout=60)
    assert start_time(child.pid) == 0


def test_a_process_is_dying_once_its_connections_have_closed() -> None:
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    with subprocess.Popen(killed, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.read() == b""  # closed by the kernel
        assert is_dying(child.pid)
