"""The interpreter's end, while threads of closed pools are still at their last tasks."""

import subprocess
import sys

import pytest

SCRIPT = """
import threading
from lp_pipe.rpc.reader_pool import ReaderPool
from lp_pipe.rpc.daemon_pool import DaemonPool

pool, has_begun = {make}, threading.Event()

def task():
    has_begun.set()
    print("ended", flush=True) if not threading.Event().wait({seconds}) else None

pool.submit(task)
has_begun.wait()
pool.close()
"""


def printed(make: str, seconds: float) -> str:
    script = SCRIPT.format(make=make, seconds=seconds)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30).stdout


@pytest.mark.parametrize("make", ["DaemonPool(1, 'x')", "ReaderPool(1, 'x')"])
def test_it_waits_a_moment_for_them(make: str) -> None:
    # One that was inside of torch then, where it freed the last step's graph, ended the process by SIGABRT.
    assert printed(make, 0.3) == "ended\n"


@pytest.mark.parametrize("make", ["DaemonPool(1, 'x')", "ReaderPool(1, 'x')"])
def test_it_does_not_wait_for_what_never_returns(make: str) -> None:
    assert printed(make, 1000.0) == ""
