"""The contract's section on launch and run, in every mode."""

import collections
import functools
import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from tests.waiting import until

WITHIN_S = 20.0
LOCK = threading.Lock()


class Server:
    def answer(self) -> int:
        return 42

    def stop(self) -> str:
        lp.stop()
        time.sleep(0.2)
        return "answered"

    def die(self) -> None:
        os._exit(7)


class Quits:
    """Ends in its own way."""

    def __init__(self, code: Any = 0) -> None:
        self._code = code

    def run(self) -> None:
        sys.exit(self._code)


def program_of(*nodes: Any, **named: Any) -> lp.Program:
    program = lp.Program("contract")
    for index, node in enumerate(nodes):
        program.add_node(node, label=f"node{index}")
    for label, node in named.items():
        program.add_node(node, label=label)
    return program


def test_wrong_arguments_of_launch() -> None:
    program = program_of(lp.PyNode(int))
    with pytest.raises(ValueError, match="'fork'"):
        lp.launch(program, "fork")
    for wrong in (None, "program", lp.PyNode(int), lp.Program):
        with pytest.raises(TypeError):
            lp.launch(wrong, "thread")  # type: ignore[arg-type]


def test_launch_returns_while_the_nodes_run_and_wait_gives_up(mode: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def pass_gate() -> None:
        while not gate.exists():
            time.sleep(0.01)

    run = lp.launch(program_of(lp.PyNode(pass_gate)), mode, grace=3.0)
    with pytest.raises(TimeoutError):
        run.wait(0.05)
    with pytest.raises(TimeoutError):
        run.wait(timeout=0)
    gate.touch()
    run.wait(30)
    run.wait(0)
    assert run.status()["node0"][0]["state"] == "finished"


def test_nodes_get_env_folder_and_path_as_they_are_at_the_call(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_templates: None
) -> None:
    monkeypatch.setenv("CONTRACT", "set")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def look() -> None:
        assert os.environ["CONTRACT"] == "set"
        assert Path.cwd() == tmp_path
        assert str(tmp_path) in sys.path

    with lp.launch(program_of(lp.PyNode(look)), mode) as run:
        run.wait(30)


class Attribute:
    def __init__(self) -> None:
        self.fine = [1]
        self.culprit = {"deep": threading.Lock()}


class Slots:
    __slots__ = ("culprit", "fine")

    def __init__(self) -> None:
        self.fine, self.culprit = 1, threading.Lock()


class Refuses:
    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle this 'Refuses' object")


def closure_of(culprit: Any, innocent: Any) -> Any:
    return lambda: (culprit, innocent)


def method_of_bad() -> Any:
    class Bad:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def method(self) -> None: ...

    return Bad().method


def global_user() -> Any:
    def uses() -> Any:
        return LOCK

    return uses


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: lp.PyNode(print, [1], threading.Lock()), ["args[1]", "lock"]),
        (lambda: lp.PyNode(print, [1], {"k": [0, threading.Lock()]}), ["args[1]['k'][1]", "lock"]),
        (lambda: lp.PyNode(print, fine=1, culprit=threading.Lock()), ["culprit", "lock"]),
        (lambda: lp.PyNode(print, Attribute()), ["args[0].culprit['deep']", "lock"]),
        (lambda: lp.PyNode(print, Slots()), ["args[0].culprit", "lock"]),
        (lambda: lp.PyNode(print, Refuses()), ["args[0]", "Refuses"]),
        (lambda: lp.PyNode(print, {Refuses(): 1}), ["args[0]", "key", "Refuses"]),
        (lambda: lp.PyNode(print, {1: 2, 3: {threading.Lock()}}), ["args[0][3]", "lock"]),
        (lambda: lp.PyNode(closure_of(threading.Lock(), [1])), ["closure variable 'culprit'", "lock"]),
        (lambda: lp.PyNode(functools.partial(print, 1, threading.Lock())), ["args[1]", "lock"]),
        (lambda: lp.PyNode(functools.partial(print, k=threading.Lock())), ["'k'", "lock"]),
        (lambda: lp.PyNode(method_of_bad()), ["lock"]),
        (lambda: lp.CourierNode(Server, lp.Deferred(print, threading.Lock())), ["args[0]", "lock"]),
        (lambda: lp.PyNode(print, (i for i in [1])), ["args[0]", "generator"]),
        (lambda: lp.PyNode(print, collections.OrderedDict(a=sys.__stdout__)), ["args[0]['a']", "TextIO"]),
        (lambda: lp.MultiThreadingColocation([lp.PyNode(int), lp.PyNode(print, 1, threading.Lock())]), ["args[1]"]),
    ],
    ids=[
        "argument",
        "dict",
        "keyword",
        "attribute",
        "slots",
        "refuses",
        "key",
        "set",
        "closure",
        "partial",
        "partial-keyword",
        "method",
        "deferred",
        "generator",
        "ordered",
        "colocation",
    ],
)
@pytest.mark.parametrize("how", [("process", None), ("thread", True)], ids=["process", "thread"])
def test_what_does_not_pickle_is_named_before_anything_starts(
    no_leaks: None, tmp_path: Path, how: Any, make: Any, parts: list[str]
) -> None:
    started = tmp_path / "started"
    program = lp.Program("check")
    program.add_node(lp.PyNode(started.touch), label="innocent")
    with program.group("culprits"):
        program.add_node(lp.PyNode(int))
        program.add_node(make())
    with pytest.raises(lp.SerializationError) as caught:
        lp.launch(program, how[0], serialize_py_nodes=how[1])
    text = str(caught.value)
    assert "culprits/1" in text.splitlines()[0]
    assert "innocent" not in text and "culprits/0" not in text
    for part in parts:
        assert part in text, text
    assert not started.exists()


def test_cached_functions_partials_and_methods_are_fine(mode: str) -> None:
    @functools.lru_cache
    def cached(x: int) -> int:
        return x

    class Bound:
        def method(self, x: int) -> None: ...

    nodes = [lp.PyNode(cached, 1), lp.PyNode(functools.partial(print, end=""), ""), lp.PyNode(Bound().method, 1)]
    with lp.launch(program_of(*nodes), mode, serialize_py_nodes=True) as run:
        run.wait(30)


def test_thread_mode_shares_arguments_that_need_not_pickle(no_leaks: None) -> None:
    shared: list[int] = []
    lock = threading.Lock()

    def use(lock: Any) -> None:
        with lock:
            shared.append(1)

    lp.launch(program_of(lp.PyNode(use, lock)), "thread").wait(30)
    assert shared == [1]


def test_wait_returns_only_when_all_nodes_are_down_and_raises_again(mode: str, tmp_path: Path) -> None:
    begun, late = tmp_path / "begun", tmp_path / "late"

    def linger() -> None:
        begun.touch()
        lp.wait_for_stop()
        time.sleep(0.5)
        late.touch()

    def fail() -> None:
        while not begun.exists():
            lp.wait_for_stop(0.01)
        raise ValueError("first")

    def fail_later() -> None:
        lp.wait_for_stop()
        raise ValueError("second")

    run = lp.launch(program_of(lp.PyNode(linger), failing=lp.PyNode(fail), later=lp.PyNode(fail_later)), mode)
    for _ in range(3):
        with pytest.raises(lp.NodeError, match="first") as caught:
            run.wait(30)
        assert caught.value.label == "failing"
        assert late.exists()
    status = run.status()
    assert status["failing"][0]["state"] == "failed" and "first" in status["failing"][0]["error"]
    run.stop()
    run.stop()


def test_an_echo_of_a_death_is_never_the_first_failure(mode: str) -> None:
    class Dies:
        def __init__(self) -> None:
            self._called = threading.Event()

        def forever(self) -> None:
            self._called.set()
            time.sleep(3)

        def run(self) -> None:
            self._called.wait()
            raise ValueError("the death itself")

    def use(dying: Any) -> None:
        dying.forever()

    program = lp.Program("echo")
    dying = program.add_node(lp.CourierNode(Dies), label="dying")
    for _ in range(4):
        program.add_node(lp.PyNode(use, dying), label="user")
    with pytest.raises(lp.NodeError, match="the death itself") as caught:
        lp.launch(program, mode, grace=1.0).wait(30)
    assert caught.value.label == "dying"


def test_stop_is_quiet_idempotent_and_concurrent(mode: str) -> None:
    run = lp.launch(program_of(lp.PyNode(lp.wait_for_stop), lp.CourierNode(Server)), mode, grace=2.0)
    threads = [threading.Thread(target=run.stop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)
    run.stop()
    run.wait()
    assert {row["state"] for rows in run.status().values() for row in rows} <= {"stopped", "finished"}


def test_status_has_the_fields(mode: str) -> None:
    program = lp.Program("status")
    with program.group("servers"):
        for _ in range(2):
            program.add_node(lp.CourierNode(Server))
    with lp.launch(program, mode) as run:
        run.client("servers", 1).answer()
        run.client("servers").answer()
        status = run.status()
        assert list(status) == ["servers"] and len(status["servers"]) == 2
        for row in status["servers"]:
            assert row["state"] == "running" and row["error"] is None
            assert isinstance(row["pid"], int) and (row["pid"] == os.getpid()) == (mode == "thread")


def test_status_counts_the_calls_of_servers(mode: str) -> None:
    program = lp.Program("calls")
    server = program.add_node(lp.CourierNode(Server), label="server")
    inner = lp.MultiThreadingColocation([lp.CourierNode(Server)])
    program.add_node(inner, label="colocation")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="silent")
    with lp.launch(program, mode) as run:
        client = run.client(server)
        deadline = time.monotonic() + WITHIN_S
        while not (rate := run.status()["server"][0]["calls_per_s"]):
            client.answer()
            assert time.monotonic() < deadline
        assert rate > 0
        while (status := run.status())["server"][0]["calls_per_s"] or status["colocation"][0]["calls_per_s"] is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert status["silent"][0]["calls_per_s"] is None
    assert run.status()["server"][0]["calls_per_s"] is None


def test_clients_of_the_launcher(mode: str) -> None:
    program = lp.Program("clients")
    handle = program.add_node(lp.CourierNode(Server), label="server")
    with lp.launch(program, mode) as run:
        assert run.client(handle).answer() == run.client("server").answer() == handle.dereference().answer() == 42
        with pytest.raises(KeyError, match="nobody"):
            run.client("nobody")
        with pytest.raises(IndexError):
            run.client("server", 1)
    for attempt in (lambda: run.client("server"), lambda: handle.dereference()):
        with pytest.raises(lp.Unavailable):
            attempt()


def test_the_launcher_does_not_wait_for_a_node_that_failed(mode: str) -> None:
    class Broken:
        def __init__(self) -> None:
            raise ValueError("never up")

        def answer(self) -> None: ...

    program = lp.Program("broken")
    handle = program.add_node(lp.CourierNode(Broken), label="broken")
    run = lp.launch(program, mode)
    with pytest.raises(lp.Unavailable):
        run.client(handle)
    with pytest.raises(lp.NodeError, match="never up"):
        run.wait(30)


def test_the_context_manager(mode: str) -> None:
    def fail() -> None:
        raise ValueError("of the node")

    with pytest.raises(KeyError, match="of the body"), lp.launch(program_of(lp.PyNode(fail)), mode):
        time.sleep(0.3)
        raise KeyError("of the body")
    with pytest.raises(lp.NodeError, match="of the node"), lp.launch(program_of(lp.PyNode(fail)), mode) as run:
        while run.status()["node0"][0]["state"] != "failed":
            time.sleep(0.01)
    with lp.launch(program_of(lp.PyNode(lp.wait_for_stop)), mode) as run:
        pass
    run.wait(0)


@pytest.mark.parametrize("code", [0, None])
def test_a_good_exit_is_a_finish(mode: str, code: Any) -> None:
    with lp.launch(
        program_of(lp.PyNode(sys.exit, code), lp.CourierNode(Quits, code), lp.PyClassNode(Quits, code)), mode
    ) as run:
        run.wait(30)
        assert {rows[0]["state"] for rows in run.status().values()} == {"finished"}


@pytest.mark.parametrize("make", [lambda c: lp.PyNode(sys.exit, c), lambda c: lp.CourierNode(Quits, c)])
@pytest.mark.parametrize("code", [3, "a reason"])
def test_any_other_exit_is_a_failure(mode: str, make: Any, code: Any) -> None:
    said = code if isinstance(code, str) else f"exit status {code}"
    with pytest.raises(lp.NodeError, match=f"node node0/0 failed: SystemExit: {said}\n"):
        lp.launch(program_of(make(code)), mode).wait(30)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os._exit(7), "exit code 7"),
        (lambda: os._exit(0), "exit code 0"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "SIGSEGV"),
    ],
)
def test_a_process_that_dies_is_reported_with_how(no_leaks: None, end: Any, words: str) -> None:
    with pytest.raises(lp.NodeError, match=words) as caught:
        lp.launch(program_of(lp.PyNode(end)), "process").wait(30)
    assert "node0/0" in str(caught.value)


def test_a_handler_that_stops_the_program_is_answered_and_others_are_unavailable(mode: str) -> None:
    class Slow(Server):
        def forever(self) -> None:
            time.sleep(4)

    program = lp.Program("stop")
    handle = program.add_node(lp.CourierNode(Slow), label="server")
    run = lp.launch(program, mode, grace=1.0)
    client = run.client(handle)
    pending = client.futures.forever()
    assert client.stop() == "answered"
    assert isinstance(pending.exception(WITHIN_S), lp.Unavailable)
    run.wait(30)


def test_a_large_result_is_delivered_although_its_server_ends(mode: str) -> None:
    class Large(Server):
        def last(self) -> bytes:
            lp.stop()
            return bytes(30_000_000)

        def array(self) -> Any:
            import numpy as np

            lp.stop()
            return np.ones(5_000_000)

    for method in ("last", "array"):
        program = lp.Program("large")
        handle = program.add_node(lp.CourierNode(Large), label="server")
        run = lp.launch(program, mode, grace=WITHIN_S)
        assert len(getattr(run.client(handle), method)()) > 0
        run.wait(30)


def test_a_large_result_waits_for_a_caller_that_is_busy(mode: str) -> None:
    class Large:
        def array(self) -> Any:
            import numpy as np

            lp.stop()
            return np.ones(5_000_000)

    program = lp.Program("large")
    handle = program.add_node(lp.CourierNode(Large), label="server")
    run = lp.launch(program, mode, grace=2.0)
    client = run.client(handle)
    sys.setswitchinterval(2.0)  # nobody else gets to read meanwhile
    try:
        future = client.futures.array()
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            pass
    finally:
        sys.setswitchinterval(0.005)
    assert len(future.result(WITHIN_S)) == 5_000_000
    run.wait(30)


def test_two_programs_are_independent(mode: str, own_templates: None) -> None:
    def fail() -> None:
        raise ValueError("one")

    bad, good = program_of(lp.PyNode(fail)), program_of(server=lp.CourierNode(Server))
    with lp.launch(good, mode) as healthy, lp.launch(good, mode) as twin:
        with pytest.raises(lp.NodeError):
            lp.launch(bad, mode).wait(30)
        assert healthy.client("server").answer() == 42
        twin.stop()
        assert healthy.client("server").answer() == 42


def test_a_thread_that_does_not_end_is_named_with_its_stack(no_leaks: None, caplog: pytest.LogCaptureFixture) -> None:
    begun, gate = threading.Event(), threading.Event()

    def stubborn_function() -> None:
        begun.set()
        gate.wait(30)

    run = lp.launch(program_of(lp.PyNode(stubborn_function)), "thread", grace=0.2)
    assert begun.wait(WITHIN_S)
    with caplog.at_level(logging.WARNING):
        run.stop()
    run.wait(1)
    gate.set()
    assert re.search(r"(?s)node0/0.*stubborn_function", caplog.text)


def test_stacks_show_every_node_and_run_dir_exists(mode: str, tmp_path: Path) -> None:
    def somewhere_special() -> None:
        (tmp_path / "there").touch()
        lp.wait_for_stop()

    with lp.launch(program_of(lp.PyNode(somewhere_special)), mode, run_dir=tmp_path / "run") as run:
        until((tmp_path / "there").exists)
        assert "somewhere_special" in run.stacks() and "node0/0" in run.stacks()
        assert run.run_dir == tmp_path / "run" and run.run_dir.is_dir()
