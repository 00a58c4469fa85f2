"""A leak check that cannot fail is a defect: everything that can be left behind is left behind once, and named."""

import gc
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

import lp_pipe as lp
from lp_pipe.testing import assert_no_leaks, leaks

BRIEFLY_S = 0.1


@pytest.fixture
def later() -> Iterator[ExitStack]:
    """Cleans up what the test has left on purpose."""
    with ExitStack() as stack:
        yield stack


def leak(make: Callable[[], object], **options: float) -> str:
    with pytest.raises(AssertionError) as caught, assert_no_leaks(patience=BRIEFLY_S, **options):  # type: ignore[arg-type]
        kept = make()
    del kept
    return str(caught.value)


def test_a_program_that_is_stopped_leaves_nothing(mode: str) -> None:
    program = lp.Program("clean")
    program.add_node(lp.CourierNode(list), label="node")
    with assert_no_leaks():
        run = lp.launch(program, mode)
        assert run.client("node").count(1) == 0
        run.stop()


def test_a_program_that_is_not_stopped_is_a_leak(mode: str, later: ExitStack) -> None:
    program = lp.Program("forgotten")
    program.add_node(lp.CourierNode(list), label="node")

    def forget() -> None:
        run = lp.launch(program, mode)
        later.callback(run.stop)
        run.client("node").count(1)

    message = leak(forget)
    assert "thread 'supervise forgotten'" in message
    if mode == "process":
        assert "process " in message and "lp_pipe.launch.processes.template_process" in message
        assert "socket " in message and "temporary file: lp-" in message


def test_a_thread_is_named_with_what_it_runs_and_where_it_is(later: ExitStack) -> None:
    ended = threading.Event()
    later.callback(ended.set)

    def poll_the_sensor() -> None:
        ended.wait()

    message = leak(threading.Thread(target=poll_the_sensor, name="poller").start)
    assert message.startswith("1 leaked:\n- thread 'poller', runs ")
    assert "poll_the_sensor" in message and "threading.py" in message


def test_a_process_is_named_with_its_command(later: ExitStack) -> None:
    def start() -> None:
        process = subprocess.Popen([sys.executable, "-c", "input()", "my-helper"], stdin=subprocess.PIPE)
        later.callback(process.wait)
        later.callback(process.kill)
        later.callback(process.stdin.close)  # type: ignore[union-attr]

    message = leak(start)
    assert "process " in message and "my-helper" in message


def test_a_process_of_a_process_is_found(later: ExitStack) -> None:
    program = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()', 'grandchild']); input()"

    def start() -> None:
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
        later.callback(process.wait)
        later.callback(process.stdin.close)  # type: ignore[union-attr]
        while len(lp_children()) < 2:
            pass

    assert "grandchild" in leak(start)


def lp_children() -> list[int]:
    from lp_pipe.process_tree import tree_of

    return tree_of(os.getpid())


def test_a_socket_is_named_with_its_address(later: ExitStack) -> None:
    def listen() -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        later.callback(listener.close)

    message = leak(listen)
    assert "socket " in message and "AF_INET at ('127.0.0.1'" in message


def test_a_socket_in_the_place_of_a_closed_one_is_new(later: ExitStack) -> None:
    first = socket.socket()

    def replace() -> None:
        number = first.fileno()
        first.close()
        second = socket.socket()
        later.callback(second.close)
        assert second.fileno() == number

    assert "socket " in leak(replace)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_shared_memory_is_found_while_it_is_open(later: ExitStack) -> None:
    def make() -> None:
        segment = SharedMemory(create=True, size=100)
        later.callback(segment.close)
        later.callback(segment.unlink)  # first: while nobody uses it, it is a leak to those who run beside this test

    assert "shared memory: /dev/shm/psm_" in leak(make)


def test_shared_memory_is_found_when_only_its_name_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_SHARED_MEMORY", tmp_path)  # in /dev/shm others would find it, too
    assert f"shared memory: {tmp_path}/left, which no process uses" in leak((tmp_path / "left").touch)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_a_semaphore_is_not_left_while_a_process_uses_it() -> None:
    """Regression: a pool's semaphore of a program beside a test counted as that test's leak."""
    before = leaks.named_segments()
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    name = Path(f"/dev/shm/sem.{semaphore._semlock.name.lstrip('/')}")  # type: ignore[attr-defined]
    assert name in leaks.named_segments() - before
    assert not leaks.is_left(name, ours=set())
    assert leaks.is_left(name, ours={os.getpid()})


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd")
def test_anonymous_shared_memory_is_found(later: ExitStack) -> None:
    def make() -> None:
        later.callback(os.close, os.memfd_create("my-buffer"))

    assert "shared memory: /memfd:my-buffer" in leak(make)


def test_a_temporary_file_is_found_whoever_made_it() -> None:
    assert "temporary file: mine-" in leak(lambda: tempfile.mkdtemp(prefix="mine-"))
    code = "import tempfile; tempfile.mkdtemp(prefix='childs-')"
    assert "temporary file: childs-" in leak(lambda: subprocess.run([sys.executable, "-c", code], check=True))


def test_temporary_files_of_others_are_not_ours() -> None:
    with tempfile.TemporaryDirectory(prefix="somebody-elses-"), assert_no_leaks(patience=0):
        folder = Path(tempfile.gettempdir()).parent / "somebody-elses-too"
        folder.mkdir()
    folder.rmdir()


def test_what_goes_within_the_patience_is_no_leak() -> None:
    ended = threading.Event()
    timer = threading.Timer(BRIEFLY_S, ended.set)
    with assert_no_leaks():
        threading.Thread(target=ended.wait, args=(10,)).start()
        timer.start()


def test_what_only_a_reference_cycle_holds_is_no_leak() -> None:
    class Holder:
        def __init__(self) -> None:
            self.myself = self
            self.ends = socket.socketpair()

    gc.disable()
    try:
        with assert_no_leaks(patience=BRIEFLY_S):
            Holder().ends[0].detach  # noqa: B018
    finally:
        gc.enable()


def test_threads_that_may_stay_are_named_by_the_beginning(later: ExitStack) -> None:
    ended = threading.Event()
    later.callback(ended.set)
    with assert_no_leaks(patience=0, ignore_threads=["monitor"]):
        threading.Thread(target=ended.wait, name="monitor of progress").start()


def test_what_was_there_before_is_nobodys_leak(later: ExitStack) -> None:
    ended = threading.Event()
    later.callback(ended.set)
    threading.Thread(target=ended.wait).start()
    ends = socket.socketpair()
    for end in ends:
        later.callback(end.close)
    with assert_no_leaks(patience=0):
        pass


def test_the_bodys_own_exception_wins(later: ExitStack) -> None:
    ended = threading.Event()
    later.callback(ended.set)
    with pytest.raises(KeyError), assert_no_leaks(patience=0):
        threading.Thread(target=ended.wait).start()
        raise KeyError


def test_all_leaks_are_in_one_message(later: ExitStack) -> None:
    ended = threading.Event()
    later.callback(ended.set)

    def several() -> None:
        threading.Thread(target=ended.wait, name="first").start()
        threading.Thread(target=ended.wait, name="second").start()
        tempfile.mkdtemp(prefix="third-")

    message = leak(several)
    assert message.startswith("3 leaked:")
    assert all(name in message for name in ("'first'", "'second'", "third-"))


def test_the_temporary_folder_is_the_usual_one_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)  # another test's patch may have been undone late
    monkeypatch.delenv("TMPDIR", raising=False)
    before = tempfile.gettempdir(), os.environ.get("TMPDIR")
    with assert_no_leaks():
        inside = tempfile.gettempdir()
        assert os.environ["TMPDIR"] == inside != before[0]
    assert (tempfile.gettempdir(), os.environ.get("TMPDIR")) == before
