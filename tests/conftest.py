"""Give every test process one compute thread and no hypothesis deadline; launch programs so that leaks are found."""

import os

# Read when torch or numpy is first imported, so it is set here, before any test module. Child processes inherit it:
# two xdist workers that each start several nodes would otherwise ask for cores × nodes threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from lp_pipe.connections import credentials
from lp_pipe.launch import template

# A shell that starts tests in the background has them ignore Ctrl+C, and so would every program that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Two test processes share two cores: the time one example takes says nothing.
settings.register_profile("lp_pipe", deadline=None)
settings.load_profile("lp_pipe")

Script = Callable[[str], "subprocess.Popen[str]"]

_LEAVE_WITHIN_S = 10.0
_LIVE_AS_LONG_AS_THE_PROCESS = (
    "deadlines",
    "connection ends",
    "return loans",
    "call callbacks",
    "close dropped streams",
)


@pytest.fixture(scope="session", autouse=True)
def _state_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ["LP_PIPE_RUNS"] = str(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def socket_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's programs put their socket directories: short (a socket's path has 107 bytes), and its own."""
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def run_credentials() -> Iterator[credentials.Credentials]:
    """This process can listen and connect over TCP, with credentials of its own."""
    generated = credentials.generate_credentials()
    credentials.use_credentials(generated)
    yield generated
    credentials.use_credentials(None)


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start in 0.2 s: the template does not import torch, though other tests of this process have."""
    monkeypatch.setattr(template, "_WORTH_PRELOADING", ())


@pytest.fixture
def no_leaks(socket_home: Path, without_torch: None) -> Iterator[None]:
    """After the test: no process, no thread and no socket directory that was not there before."""
    threads = set(threading.enumerate())
    processes = set(psutil.Process().children(recursive=True))
    yield
    left_processes = set(psutil.Process().children(recursive=True)) - processes
    _, alive = psutil.wait_procs(list(left_processes), timeout=_LEAVE_WITHIN_S)
    assert not alive, f"processes were left behind: {alive}"
    deadline = time.monotonic() + _LEAVE_WITHIN_S
    while left := _threads_that_should_end(threads):
        assert time.monotonic() < deadline, f"threads were left behind: {left}"
        left[0].join(0.1)
    assert not list(socket_home.glob("lp-*")), "a socket directory was left behind"


def _threads_that_should_end(before: set[threading.Thread]) -> list[threading.Thread]:
    new = [thread for thread in threading.enumerate() if thread not in before and thread.ident is not None]
    return [thread for thread in new if not thread.name.startswith(_LIVE_AS_LONG_AS_THE_PROCESS)]


@pytest.fixture(params=["thread", "process"])
def mode(request: pytest.FixtureRequest, no_leaks: None) -> str:
    """Every launch mode: one test body must hold in all of them."""
    return str(request.param)


@pytest.fixture
def script(tmp_path: Path, socket_home: Path) -> Iterator[Script]:
    """Start Python source as a script of its own, in a session of its own, with its output piped."""
    started: list[subprocess.Popen[str]] = []

    def start(source: str) -> "subprocess.Popen[str]":
        path = tmp_path / f"script{len(started)}.py"
        path.write_text(textwrap.dedent(source))
        process = subprocess.Popen(
            [sys.executable, "-u", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
