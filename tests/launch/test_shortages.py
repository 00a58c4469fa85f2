"""Too few threads or file descriptors for a program: launch says which, and nothing of it is left."""

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import lp_pipe as lp
from lp_pipe.testing import assert_no_leaks

WITHIN_S = 20.0


class Server:
    def ping(self) -> str:
        return "pong"


def ask(server: Server) -> None:
    assert server.ping() == "pong"
    lp.wait_for_stop()


def asking_program() -> lp.Program:
    program = lp.Program("asking")
    server = program.add_node(lp.CourierNode(Server), label="server")
    with program.group("asker"):
        for _ in range(2):
            program.add_node(lp.PyNode(ask, server))
    return program


# A launch goes on without the thread that completes its record, and sets BLAS's number of threads itself.
DISPENSABLE = ("record of the run", "threads of BLAS")


class Threads:
    """Counts those that the main thread starts, and fails the start of one, as CPython does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.failing = 0
        self._start = threading.Thread.start
        monkeypatch.setattr(threading.Thread, "start", lambda thread: self._started(thread))

    def _started(self, thread: threading.Thread) -> None:
        if threading.current_thread() is threading.main_thread() and thread.name not in DISPENSABLE:
            self.names.append(thread.name)
            if len(self.names) == self.failing:
                raise RuntimeError("can't start new thread")
        self._start(thread)


@contextmanager
def most_descriptors(more: int) -> Iterator[None]:
    """Limit the process to so many more descriptors than are open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_whichever_thread_cannot_be_started_launch_says_so_and_takes_down_what_was(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads(monkeypatch)
    run = lp.launch(asking_program(), mode, listed=False)
    needed = list(threads.names)  # before the stop, which may start some as well
    run.stop()
    assert len(needed) >= 3

    for number, name in enumerate(needed, 1):
        threads.names.clear()
        threads.failing = number
        with assert_no_leaks(), pytest.raises(lp.LaunchError, match=r"'asking' could not be launched.*ulimit -u"):
            lp.launch(asking_program(), mode, listed=False).stop()
            pytest.fail(f"launched without {name}: needed {needed}, started {threads.names}")


def test_a_run_that_finds_no_thread_to_be_asked_in_goes_on_and_says_so(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = Threads(monkeypatch)
    lp.launch(asking_program(), mode, listed=False, hang_after=None).stop()
    threads.failing = len(threads.names) + 1  # the one that accepts the control's callers
    threads.names.clear()

    with lp.launch(asking_program(), mode, listed=True, hang_after=None) as run:
        assert run.client("server").ping() == "pong"

    assert "cannot be found by `lp_pipe status`" in caplog.text


def test_a_launch_with_too_few_descriptors_says_how_many_it_needs(no_leaks: None) -> None:
    with most_descriptors(10), pytest.raises(lp.LaunchError, match=r"3 nodes need 17 file descriptors.*ulimit -n"):
        lp.launch(asking_program(), "process")


def test_a_launch_without_descriptors_says_which_limit(no_leaks: None) -> None:
    with most_descriptors(1), pytest.raises(lp.LaunchError, match=r"descriptors|Too many open files.*ulimit -n"):
        lp.launch(asking_program(), "process")


def test_stop_handlers_run_without_a_thread_of_their_own_when_there_is_none(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled = threading.Event()
    is_up = threading.Event()

    def serve() -> None:
        lp.register_stop_handler(handled.set)
        is_up.set()
        lp.wait_for_stop()

    program = lp.Program("handling")
    program.add_node(lp.PyNode(serve), label="node")
    start = threading.Thread.start

    def start_no_handlers(thread: threading.Thread) -> None:
        if thread.name == "stop-handlers":
            raise RuntimeError("can't start new thread")
        start(thread)

    with lp.launch(program, "thread"):
        assert is_up.wait(WITHIN_S)
        monkeypatch.setattr(threading.Thread, "start", start_no_handlers)

    assert handled.is_set()
