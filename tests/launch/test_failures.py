"""Nodes that are broken in every way: their peers notice, wait() names them, and nothing is left."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil
import pytest

import lp_pipe as lp
from lp_pipe.errors import ChannelClosed
from lp_pipe.launch.coordination import coordinator, node_lifecycle
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("warm_bare_template")

WITHIN_S = 20.0
REPORTED_WITHIN_S = 1.0
# Two xdist workers, several processes each, on two cores: what the product promises, and what the machine takes.
SLACK_S = 2.0


def failure_of(program: lp.Program, mode: str, **options: Any) -> lp.NodeError:
    with pytest.raises(lp.NodeError) as caught:
        lp.launch(program, mode, **options).wait(WITHIN_S)
    return caught.value


def one_node(node: lp.Node[Any]) -> lp.Program:
    program = lp.Program("one")
    program.add_node(node, label="node")
    return program


class FailsWhenAsked:
    """A server that ends with an error while it is called."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def block(self) -> None:
        self._asked.set()
        lp.wait_for_stop()

    def run(self) -> None:
        assert self._asked.wait(WITHIN_S)
        raise ValueError("the cause")


class Pid:
    """A server that tells where it is, and can be asked to wait."""

    def pid(self) -> int:
        return os.getpid()

    def block(self) -> None:
        lp.wait_for_stop()

    def exit(self, status: int) -> None:
        os._exit(status)

    def kill(self, number: int) -> None:
        os.kill(os.getpid(), number)


def test_wait_raises_the_first_failure_with_the_nodes_name_and_traceback(mode: str) -> None:
    def train() -> None:
        try:
            raise KeyError("layer")
        except KeyError as error:
            raise ValueError("bad config") from error

    program = lp.Program("usage")
    program.add_node(lp.PyNode(train), label="trainer")
    run = lp.launch(program, mode)
    for _ in range(2):  # again on every later wait
        with pytest.raises(lp.NodeError) as caught:
            run.wait(WITHIN_S)
    error = caught.value
    assert (error.label, error.index, error.type_name) == ("trainer", 0, "ValueError")
    assert isinstance(error, lp.LpPipeError)
    assert isinstance(error, RuntimeError)
    assert not isinstance(error, ValueError)
    for part in ("trainer/0", "ValueError: bad config", "KeyError: 'layer'", "direct cause", "in train"):
        assert part in str(error)
    assert "in train" in error.remote_traceback
    assert run.status()["trainer"][0]["state"] == "failed"
    assert "bad config" in str(run.status()["trainer"][0]["error"])


class BrokenConstructor:
    def __init__(self) -> None:
        raise ValueError("constructor")


class BrokenRun:
    def run(self) -> None:
        raise ValueError("run")


@pytest.mark.parametrize("kind", [lp.PyClassNode, lp.CourierNode])
@pytest.mark.parametrize("broken", [BrokenConstructor, BrokenRun])
def test_constructors_and_run_methods_that_raise(mode: str, kind: Any, broken: type) -> None:
    error = failure_of(one_node(kind(broken)), mode)
    assert error.message == broken.__name__.removeprefix("Broken").lower()


class OddError(Exception):
    """Takes two arguments, and has one in args."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.lock = threading.Lock()


class BrokenStr(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def make_local() -> Exception:
    class LocalError(Exception):
        pass

    return LocalError("local")


@pytest.mark.parametrize(
    ("make", "type_name"),
    [
        (lambda: OddError(1, 2), "OddError"),
        (lambda: BrokenStr(), "BrokenStr"),
        (make_local, "LocalError"),
        (lambda: StopIteration(3), "StopIteration"),
        (lambda: KeyboardInterrupt(), "KeyboardInterrupt"),
        (lambda: FileNotFoundError(2, "no such", "not utf-8: \udcff"), "FileNotFoundError"),
    ],
)
def test_odd_exceptions_surface_all_the_same(mode: str, make: Callable[[], BaseException], type_name: str) -> None:
    def fail() -> None:
        raise make()

    assert failure_of(one_node(lp.PyNode(fail)), mode).type_name == type_name


def test_a_handler_that_raises_fails_its_caller_and_not_its_node(mode: str) -> None:
    class Server:
        def fail(self) -> None:
            raise ValueError("for the caller")

        def leave(self) -> None:
            raise SystemExit(3)

        def ok(self) -> str:
            return "still here"

    program = lp.Program("handler")
    handle = program.add_node(lp.CourierNode(Server), label="server")
    with lp.launch(program, mode) as run:
        client = run.client(handle)
        with pytest.raises(ValueError, match="for the caller"):
            client.fail()
        with pytest.raises(lp.RemoteError, match="SystemExit"):
            client.leave()
        assert client.ok() == "still here"


def test_a_remote_error_that_ends_a_node_names_the_innermost_class(mode: str) -> None:
    class Server:
        def fail(self) -> None:
            raise LookupError("deep inside")

    def use(server: Any) -> None:
        server.fail()

    program = lp.Program("chain")
    server = program.add_node(lp.CourierNode(Server), label="server")
    program.add_node(lp.PyNode(use, server), label="user")
    error = failure_of(program, mode)
    assert (error.label, error.type_name) == ("user", "LookupError")
    assert "deep inside" in error.message
    assert "in fail" in str(error)


def test_later_failures_do_not_mask_the_first(mode: str) -> None:
    class Later(Pid):
        def run(self) -> None:
            lp.wait_for_stop()
            raise ValueError("later")

    def first(others: list[Any]) -> None:
        for other in others:
            other.pid()
        raise ValueError("first")

    program = lp.Program("masks")
    others = [program.add_node(lp.CourierNode(Later), label=f"later{index}") for index in range(3)]
    program.add_node(lp.PyNode(first, others), label="first")
    run = lp.launch(program, mode)
    with pytest.raises(lp.NodeError, match="first/0"):
        run.wait(WITHIN_S)
    assert run.later_failures == 3
    whole = (run.run_dir / "failure.txt").read_text()  # nothing else tells what they were
    assert whole.startswith("node first/0 failed: ValueError: first")
    assert whole.count("node later") == whole.count("in run\n") == 3


class _Unspeakable(BaseException):
    """An exception that cannot even be printed."""

    def __str__(self) -> str:
        raise KeyboardInterrupt("not now")


class _UnspeakableStatus:
    def __eq__(self, other: object) -> bool:
        raise LookupError("not comparable")

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_Unspeakable, r"_Unspeakable: <str\(\) of the exception raised KeyboardInterrupt>"),
        (lambda: SystemExit(_UnspeakableStatus()), "LookupError: not comparable"),
    ],
)
def test_an_exception_that_cannot_be_told_is_a_failure_all_the_same(
    mode: str, make: Callable[[], BaseException], says: str
) -> None:
    """Regression: in thread mode the program ended well."""

    def fail() -> None:
        raise make()

    assert re.search(says, str(failure_of(one_node(lp.PyNode(fail)), mode)))


def test_a_failure_after_the_stop_does_not_fail_the_program_but_is_told(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        lp.stop()
        raise OSError("cannot save the model")

    lp.launch(one_node(lp.PyNode(train)), mode).wait(WITHIN_S)
    assert "node node/0 failed after the stop: OSError: cannot save the model" in caplog.text
    assert "in train" in caplog.text


class KnowsItsClients:
    """A server that can be asked to wait until six nodes call it."""

    def __init__(self) -> None:
        self._are_here = threading.Barrier(7)

    def come(self) -> None:
        self._are_here.wait(WITHIN_S)

    def ask(self) -> None:
        """Answers at once."""


def ask_for_ever(server: Any) -> None:
    server.come()
    while True:
        server.ask()


def ask_and_explain(server: Any) -> None:
    try:
        ask_for_ever(server)
    except lp.Unavailable as error:
        raise lp.errors.PipelineError("the server has gone") from error


def ask_and_save(server: Any) -> None:
    try:
        ask_for_ever(server)
    finally:
        raise OSError("cannot save the model")


class AsksInItsRun:
    def __init__(self, server: Any) -> None:
        self._server = server

    def run(self) -> None:
        ask_for_ever(self._server)


def stop_once_all_ask(server: Any) -> None:
    server.come()
    lp.stop()


@pytest.mark.parametrize("is_stopped_by_a_node", [False, True])
def test_what_a_stopped_neighbour_ends_is_stopped_and_an_error_of_its_own_a_failure(
    mode: str, is_stopped_by_a_node: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # `lp_pipe stop` said "1 failed, 3 stopped" of a program whose launch said "done".
    program = lp.Program("asking")
    server = program.add_node(lp.CourierNode(KnowsItsClients), label="server")
    program.add_node(lp.PyNode(ask_for_ever, server), label="asking")
    program.add_node(lp.CourierNode(AsksInItsRun, server), label="serving")
    program.add_node(lp.PyNode(ask_and_explain, server), label="explaining")
    with program.group("indifferent", on_failure="ignore"):
        program.add_node(lp.PyNode(ask_for_ever, server))
    program.add_node(lp.MultiThreadingColocation([lp.PyNode(ask_for_ever, server)]), label="together")
    program.add_node(lp.PyNode(ask_and_save, server), label="saving")
    if is_stopped_by_a_node:
        program.add_node(lp.PyNode(stop_once_all_ask, server), label="stopping")
    run = lp.launch(program, mode)
    if not is_stopped_by_a_node:
        run.client("server").come()
        run.stop()
    run.wait(WITHIN_S)
    ends = {label: (rows[0]["state"], rows[0]["error"]) for label, rows in run.status().items()}
    assert ends.pop("saving") == ("failed", "OSError: cannot save the model")
    assert set(ends.values()) == {("stopped", None)}
    assert "node saving/0 failed after the stop: OSError: cannot save the model" in caplog.text


def test_the_echo_of_a_failed_node_is_not_the_first_failure(mode: str) -> None:
    def use(server: Any) -> None:
        try:
            server.block()
        except lp.Unavailable as error:
            raise RuntimeError("the server has gone") from error

    program = lp.Program("echo")
    server = program.add_node(lp.CourierNode(FailsWhenAsked), label="server")
    program.add_node(lp.PyNode(use, server), label="user")
    # If the failure waited for the blocked handler, the echo would win at the end of the grace, or nothing be told.
    error = failure_of(program, mode, grace=2 * WITHIN_S)
    assert (error.label, error.message) == ("server", "the cause")


def test_what_gloo_raises_where_another_rank_has_died_is_an_echo(no_leaks: None) -> None:
    """Gloo's error has no class of its own. With several hosts it comes before the news of the death."""
    import torch.distributed

    assert torch.distributed.is_available()
    may_die = threading.Event()

    def survive() -> None:
        raise RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:7"
        )

    def die() -> None:
        assert may_die.wait(WITHIN_S)
        raise ValueError("the cause")

    program = lp.Program("ranks")
    program.add_node(lp.PyNode(survive), label="survivor")
    program.add_node(lp.PyNode(die), label="dead")
    run = lp.launch(program, "thread")
    until(lambda: run.status()["survivor"][0]["state"] == "failed")
    may_die.set()
    with pytest.raises(lp.NodeError, match="dead/0 failed: ValueError: the cause"):
        run.wait(WITHIN_S)


def test_an_unavailable_that_no_death_explains_is_a_failure(mode: str) -> None:
    class Short:
        def run(self) -> None:
            """Ends at once, and well."""

    def use(server: Any) -> None:
        while True:
            server.anything()

    program = lp.Program("no echo")
    server = program.add_node(lp.CourierNode(Short), label="short")

    def use_quietly(server: Any) -> None:
        with contextlib.suppress(lp.MethodNotFound):
            use(server)

    program.add_node(lp.PyNode(use_quietly, server), label="user")
    run = lp.launch(program, mode)
    try:
        run.wait(WITHIN_S)
    except lp.NodeError as error:
        assert (error.label, error.type_name) == ("user", "Unavailable")


# [P] Processes can be killed.


def test_a_killed_node_is_reported_at_once_with_its_name_and_signal(no_leaks: None) -> None:
    def use(server: Any) -> None:
        server.block()

    program = lp.Program("killed")
    server = program.add_node(lp.CourierNode(Pid), label="server")
    program.add_node(lp.PyNode(use, server), label="user")  # dies of it: the echo
    run = lp.launch(program, "process")
    pid = run.client(server).pid()
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(lp.NodeError, match=r"server/0.*SIGKILL") as caught:
        run.wait(WITHIN_S)
    assert caught.value.label == "server"
    assert time.monotonic() - start < REPORTED_WITHIN_S + SLACK_S


def test_a_killed_node_is_reported_although_a_grandchild_holds_its_output_open(no_leaks: None) -> None:
    class Forks(Pid):
        def __init__(self) -> None:
            if os.fork() == 0:
                os.setsid()
                time.sleep(1000)

    def use(server: Any) -> None:
        server.block()

    program = lp.Program("forks")
    server = program.add_node(lp.CourierNode(Forks), label="server")
    program.add_node(lp.PyNode(use, server), label="user")
    run = lp.launch(program, "process")
    os.kill(run.client(server).pid(), signal.SIGKILL)
    with pytest.raises(lp.NodeError, match=r"server/0.*SIGKILL"):
        run.wait(WITHIN_S)


def test_a_client_of_an_echo_waits_for_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    # A neighbour of a killed stage says first that its channel is closed: the client was told that, and no more.
    for module in (coordinator, node_lifecycle):
        monkeypatch.setattr(module, "ECHO_PATIENCE_S", WITHIN_S)
    may_fail = threading.Event()

    class Echo:
        def __init__(self) -> None:
            raise ChannelClosed("the peer has gone")

    def dies() -> None:
        may_fail.wait(WITHIN_S)
        raise ValueError("the cause")

    program = lp.Program("echo")
    handle = program.add_node(lp.CourierNode(Echo), label="neighbour")
    program.add_node(lp.PyNode(dies), label="dead")
    run = lp.launch(program, "thread")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(run.client, handle)
        wait([asked], 0.2)  # as it would be answered without the cause
        may_fail.set()
        with pytest.raises(lp.Unavailable, match="node dead/0 failed: ValueError: the cause"):
            asked.result(WITHIN_S)
    with pytest.raises(lp.NodeError, match="the cause"):
        run.wait(WITHIN_S)


@pytest.mark.parametrize("status", [0, 7])
def test_a_process_that_ends_without_a_word_is_a_failure_with_its_exit_code(status: int, no_leaks: None) -> None:
    def leave() -> None:
        print("last words", flush=True)
        os._exit(status)

    error = failure_of(one_node(lp.PyNode(leave)), "process")
    assert f"exit code {status}" in error.message
    assert "last words" in str(error)


def test_a_process_that_a_signal_without_a_name_kills_is_a_failure_with_its_number(no_leaks: None) -> None:
    # Nobody was told of its end, nor of any later one: the program ran for ever.
    number = signal.SIGRTMIN + 6
    error = failure_of(one_node(lp.PyNode(lambda: os.kill(os.getpid(), number))), "process")
    assert f"signal {number}" in error.message


def test_a_crash_in_c_code_is_reported_with_its_signal(no_leaks: None) -> None:
    error = failure_of(one_node(lp.PyNode(os.abort)), "process")
    assert "SIGABRT" in error.message


def read_null() -> None:
    ctypes.string_at(0)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_crash_in_c_code_is_reported_with_its_python_stack(fresh: bool, no_leaks: None) -> None:
    program = lp.Program("crash")
    with program.group("node", resources=lp.Resources(fresh_interpreter=fresh)):
        program.add_node(lp.PyNode(read_null))
    error = failure_of(program, "process")
    assert "SIGSEGV" in error.message
    lines = error.report.splitlines()
    first = next(index for index, line in enumerate(lines) if "innermost call first" in line)
    assert "test_failures.py" in lines[first + 1]
    assert "in read_null:  ctypes.string_at(0)" in lines[first + 1]
    assert len(lines) <= 15


def test_the_fault_handler_can_be_switched_off(no_leaks: None) -> None:
    program = lp.Program("crash")
    with program.group("node", resources=lp.Resources(env={"PYTHONFAULTHANDLER": "0"})):
        program.add_node(lp.PyNode(read_null))
    assert "read_null" not in failure_of(program, "process").report


def test_a_call_to_a_process_that_dies_is_unavailable_and_later_calls_too(no_leaks: None) -> None:
    program = lp.Program("dies")
    handle = program.add_node(lp.CourierNode(Pid), label="server")
    run = lp.launch(program, "process")
    client = run.client(handle)
    pending = client.futures.block()
    with pytest.raises(lp.Unavailable, match="exit"):
        client.exit(3)
    assert isinstance(pending.exception(WITHIN_S), lp.Unavailable)
    with pytest.raises(lp.Unavailable):
        client.pid()
    with pytest.raises(lp.NodeError, match="exit code 3"):
        run.wait(WITHIN_S)


def test_a_death_that_only_a_broken_call_tells_of_is_raised_at_the_end_of_the_block(no_leaks: None) -> None:
    # The launcher hears of a process's end later than its clients do, and took it for one of those that it had stopped.
    program = one_node(lp.CourierNode(Pid))
    with pytest.raises(lp.NodeError, match="exit code 3"), lp.launch(program, "process") as run:
        assert "exit code 3" in str(run.client("node").futures.exit(3).exception(WITHIN_S))


def test_a_failure_that_only_a_broken_call_tells_of_is_raised_at_the_end_of_the_block(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where clients saw the server close before the launcher knew of it, the failure passed for one after the stop.
    may_know = threading.Event()
    withdraw = coordinator.Coordinator.withdraw

    def withdraw_late(*news: Any) -> None:
        assert may_know.wait(WITHIN_S)
        withdraw(*news)

    monkeypatch.setattr(coordinator.Coordinator, "withdraw", withdraw_late)
    program = one_node(lp.CourierNode(FailsWhenAsked))
    with pytest.raises(lp.NodeError, match="the cause"), lp.launch(program, mode) as run:
        call = run.client("node").futures.block()
        with pytest.raises(TimeoutError):
            call.result(0.2)
        may_know.set()
        with pytest.raises(lp.Unavailable):
            call.result(WITHIN_S)


def stop_once_unavailable(server: Any, method: str, *args: Any) -> None:
    with pytest.raises(lp.Unavailable):
        getattr(server, method)(*args)
    lp.stop()


def test_a_neighbour_that_stops_the_program_for_a_failure_does_not_hide_it(mode: str) -> None:
    # The stop was there before the word of the failed node was: wait() returned as if all had ended well.
    program = lp.Program("reacts")
    server = program.add_node(lp.CourierNode(FailsWhenAsked), label="server")
    program.add_node(lp.PyNode(stop_once_unavailable, server, "block"), label="user")
    error = failure_of(program, mode)
    assert (error.label, error.message) == ("server", "the cause")


@pytest.mark.parametrize(("method", "number", "how"), [("exit", 3, "exit code 3"), ("kill", 9, "SIGKILL")])
def test_a_neighbour_that_stops_the_program_for_a_death_does_not_hide_it(
    method: str, number: int, how: str, no_leaks: None
) -> None:
    program = lp.Program("reacts")
    server = program.add_node(lp.CourierNode(Pid), label="server")
    program.add_node(lp.PyNode(stop_once_unavailable, server, method, number), label="user")
    error = failure_of(program, "process")
    assert error.label == "server" and how in error.message


def test_a_node_that_ignores_stop_is_killed_after_the_grace(no_leaks: None) -> None:
    def stubborn() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)

    program = lp.Program("stubborn")
    program.add_node(lp.PyNode(stubborn), label="stubborn")
    program.add_node(lp.CourierNode(Pid), label="server")
    run = lp.launch(program, "process", grace=0.3)
    run.client("server").pid()
    start = time.monotonic()
    run.stop()
    assert time.monotonic() - start < 0.3 + 1.0 + SLACK_S
    run.wait()
    assert run.status()["stubborn"][0]["state"] == "stopped"


def test_sigterm_comes_before_sigkill(tmp_path: Path, no_leaks: None) -> None:
    def polite() -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit((tmp_path / "asked").write_text("please") and 0))
        (tmp_path / "listens").touch()
        while True:
            time.sleep(1)

    program = lp.Program("polite")
    program.add_node(lp.PyNode(polite), label="polite")
    run = lp.launch(program, "process", grace=0.5)
    until((tmp_path / "listens").exists)
    run.stop()
    assert (tmp_path / "asked").read_text() == "please"


@pytest.mark.parametrize("new_session", [False, True])
@pytest.mark.parametrize("end", ["stop", "kill", "finish"])
def test_grandchildren_die_with_the_program(new_session: bool, end: str, no_leaks: None) -> None:
    class Parent(Pid):
        def __init__(self) -> None:
            self._over = threading.Event()

        def spawn(self) -> int:
            return subprocess.Popen(["sleep", "1000"], start_new_session=new_session).pid

        def finish(self) -> None:
            self._over.set()

        def run(self) -> None:
            while not (self._over.wait(0.01) or lp.context().is_stopping):
                pass

    program = lp.Program("grandchildren")
    program.add_node(lp.CourierNode(Parent), label="parent")
    run = lp.launch(program, "process")
    client = run.client("parent")
    grandchild = psutil.Process(client.spawn())
    if end == "stop":
        run.stop()
    elif end == "finish":
        client.finish()
        run.wait(WITHIN_S)
    else:
        os.kill(client.pid(), signal.SIGKILL)
        with pytest.raises(lp.NodeError):
            run.wait(WITHIN_S)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_the_death_of_the_template_ends_the_program_with_an_error(no_leaks: None) -> None:
    program = lp.Program("template")
    program.add_node(lp.CourierNode(Pid), label="server")
    run = lp.launch(program, "process")
    node = psutil.Process(run.client("server").pid())
    template = node.parent()
    assert template is not None
    template.kill()
    with pytest.raises(lp.NodeError, match=r"server/0[\s\S]*template[\s\S]*SIGKILL"):
        run.wait(WITHIN_S)


@pytest.mark.parametrize("behaviour", [pytest.param("lp.wait_for_stop()", marks=pytest.mark.slow), "ignore()"])
def test_when_the_launcher_is_killed_nothing_is_left(script: Any, socket_home: Path, behaviour: str) -> None:
    launcher = script(f"""
        import os, signal, subprocess, time
        import lp_pipe as lp

        def ignore():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(1)

        def node():
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            print(os.getpid(), os.getppid(), child.pid)
            {behaviour}

        program = lp.Program("orphans")
        program.add_node(lp.PyNode(node), label="node")
        lp.launch(program, "process").wait()
    """)
    processes = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()[1:]]
    assert len(processes) == 3
    assert list(socket_home.glob("lp-*"))
    launcher.kill()
    _, alive = psutil.wait_procs(processes, timeout=15.0)
    assert not alive
    assert not list(socket_home.glob("lp-*"))


def test_a_launcher_that_is_silent_for_a_while_is_not_taken_for_dead(script: Any) -> None:
    launcher = script("""
        import time
        import lp_pipe as lp

        class Server:
            def add(self, a, b):
                return a + b

        program = lp.Program("frozen")
        program.add_node(lp.CourierNode(Server), label="server")
        with lp.launch(program, "process") as run:
            client = run.client("server")
            print(client.add(1, 1))
            time.sleep(1.5)
            print(client.add(2, 2))
    """)
    assert launcher.stdout.readline().strip() == "2"
    os.kill(launcher.pid, signal.SIGSTOP)
    time.sleep(3.0)  # the silence is what is tested
    os.kill(launcher.pid, signal.SIGCONT)
    out, err = launcher.communicate(timeout=WITHIN_S)
    assert (out.strip(), launcher.returncode) == ("4", 0), err


class AsksInItsConstructor:
    def __init__(self, next_one: Any) -> None:
        next_one.pid()


class NeverUp:
    def __init__(self) -> None:
        raise ValueError("no such weights file")


def test_who_asks_a_node_that_another_ones_failure_has_ended_is_told_of_that_one(mode: str) -> None:
    """Regression: it was told of the neighbour first: "node first/0 failed: Unavailable: node second/0 failed: …"."""
    program = lp.Program("chain")
    last = program.add_node(lp.CourierNode(NeverUp), label="last")
    second = program.add_node(lp.CourierNode(AsksInItsConstructor, last), label="second")
    program.add_node(lp.CourierNode(AsksInItsConstructor, second), label="first")
    run = lp.launch(program, mode)
    with pytest.raises(lp.Unavailable, match="node last/0 failed: ValueError: no such weights file") as caught:
        run.client("first").pid()
    assert "Unavailable:" not in str(caught.value)
    with pytest.raises(lp.NodeError, match="node last/0 failed: ValueError"):
        run.wait(WITHIN_S)


def test_an_unavailable_of_a_handlers_own_client_has_the_failure_as_its_cause(mode: str) -> None:
    # A pipeline's step that asks a stage which another one's failure has ended: its text alone told of that.
    class Failing:
        def __init__(self, middle: Any) -> None:
            middle.asks()
            raise ValueError("the cause")

    class Middle:
        def __init__(self, failing: Any) -> None:
            self._failing = failing
            self._asking = threading.Event()

        def asks(self) -> None:
            assert self._asking.wait(WITHIN_S)

        def ask(self) -> None:
            self._asking.set()
            self._failing.anything()

    program = lp.Program("chain")
    node = lp.CourierNode(Middle, None)
    middle = program.add_node(node, label="middle")
    node.configure(program.add_node(lp.CourierNode(Failing, middle), label="failing"))
    run = lp.launch(program, mode)
    with pytest.raises(lp.RemoteError, match=r"middle/0.ask\(\) raised Unavailable") as caught:
        run.client(middle).ask()
    assert isinstance(caught.value, lp.Unavailable)
    assert isinstance(caught.value.__cause__, lp.NodeError) and caught.value.__cause__.label == "failing"
    with pytest.raises(lp.NodeError, match="the cause"):
        run.wait(WITHIN_S)


def test_a_failure_is_told_though_the_current_folder_was_removed(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wait() raised a FileNotFoundError in its place."""
    may_fail = tmp_path / "may fail"
    os.mkfifo(may_fail)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)

    def fail() -> None:
        may_fail.read_bytes()
        raise ValueError("bad config")

    run = lp.launch(one_node(lp.PyNode(fail)), mode)
    gone.rmdir()
    may_fail.write_bytes(b"")
    with pytest.raises(lp.NodeError, match="bad config") as caught:
        run.wait(WITHIN_S)
    assert "bad config" in caught.value.report


def test_a_launch_from_a_folder_that_was_removed_says_so(
    no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(lp.LaunchError, match="the current folder, in which the nodes would run, was removed"):
        lp.launch(one_node(lp.PyNode(print)), "process")


def test_a_launch_whose_folder_cannot_be_made_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: in a container without a home folder it was four chained FileNotFoundErrors of pathlib's."""
    program = lp.Program("nowhere")
    program.add_node(lp.PyNode(int), label="node")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("LP_PIPE_RUNS", raising=False)
    with pytest.raises(lp.LaunchError, match=r"file/lp_pipe/runs/.* \(Not a directory\): set LP_PIPE_RUNS"):
        lp.launch(program, "thread")
    with pytest.raises(lp.LaunchError, match=r"file \(File exists\)"):
        lp.launch(program, "thread", run_dir=tmp_path / "file")
