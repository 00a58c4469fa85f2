"""Launch a program: what its nodes may do, how it ends, and what the launcher sees. The same in every mode."""

import contextlib
import functools
import gc
import json
import logging
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import lp_pipe as lp
from tests.conftest import Script
from tests.forking import holds_in_a_fork
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("warm_bare_template")

WITHIN_S = 20.0


class Server:
    """Answers until the program stops."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def add(self, a: int, b: int) -> int:
        return a + b

    def name(self) -> str:
        return self._name


def serving(*nodes: lp.Node[Any], program: str = "program") -> tuple[lp.Program, lp.CourierHandle]:
    """A program with a server, in which other nodes may be."""
    graph = lp.Program(program)
    handle = graph.add_node(lp.CourierNode(Server, "the server"), label="server")
    for index, node in enumerate(nodes):
        graph.add_node(node, label=f"node{index}")
    return graph, handle


@pytest.mark.parametrize("pool", [0, 16])
@pytest.mark.parametrize("beside", ["", "a process"])
def test_a_forked_process_reaches_the_server_itself_or_is_told_that_it_cannot(
    mode: str, pool: int, beside: str
) -> None:
    program = lp.Program("counting")
    handle = program.add_node(lp.CourierNode(Counter, courier_kwargs={"thread_pool_size": pool}), label="counter")
    if beside:
        program.add_node(lp.MultiProcessingColocation([lp.PyNode(lp.wait_for_stop)]), label="beside")
    with lp.launch(program, mode) as run:
        client = lp.CourierClient(run.client(handle).address, call_timeout=WITHIN_S)
        assert client.add() == 1
        if mode == "thread" and not beside:
            assert holds_in_a_fork(lambda: "mode='process'" in unavailable(client))
            assert is_unavailable_in_a_new_process(client)
            assert client.add() == 2
        else:
            assert holds_in_a_fork(lambda: client.add() == 2)
            assert client.add() == 3


@pytest.mark.parametrize("who", ["node", "launcher"])
def test_a_forked_process_waits_for_a_server_that_is_not_up_yet(who: str, tmp_path: Path, without_torch: None) -> None:
    """Regression: the launcher answered the process's parent, and the process waited for ever."""
    go = tmp_path / "go"

    class LateCounter(Counter):
        def __init__(self) -> None:
            while not go.exists():
                time.sleep(0.01)
            super().__init__()

    def add(counter: Callable[[], lp.CourierClient]) -> bool:
        threading.Timer(0.3, go.touch).start()  # when the call is under way
        return bool(counter().add() == 1)

    def fork(counter: lp.CourierClient) -> None:
        assert holds_in_a_fork(lambda: add(lambda: counter))
        lp.stop()

    program = lp.Program("late")
    handle = program.add_node(lp.CourierNode(LateCounter), label="counter")
    if who == "node":
        program.add_node(lp.PyNode(fork, handle), label="forking")
    with lp.launch(program, "process") as run:
        if who == "launcher":
            assert holds_in_a_fork(lambda: add(lambda: run.client(handle)))
        else:
            run.wait(WITHIN_S)


def test_what_only_the_launcher_knows_is_not_asked_by_a_forked_process(without_torch: None) -> None:
    address = lp.Address()

    def is_told_so() -> bool:
        with pytest.raises(lp.Unavailable, match="answers the node, not process"):
            address.resolve()
        return True

    def fork() -> None:
        assert holds_in_a_fork(is_told_so)

    node = lp.PyNode(fork)
    address.assign(node)
    program = lp.Program("address")
    program.add_node(node, label="forking")
    lp.launch(program, "process").wait(WITHIN_S)


class Counter:
    def __init__(self) -> None:
        self._count = 0

    def add(self) -> int:
        self._count += 1
        return self._count


def unavailable(client: lp.CourierClient) -> str:
    with pytest.raises(lp.Unavailable) as caught:
        client.add()
    return str(caught.value)


def is_unavailable_in_a_new_process(client: lp.CourierClient) -> bool:
    script = f"import lp_pipe as lp; lp.CourierClient({client.address!r}, call_timeout={WITHIN_S}).add()"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return "Unavailable" in ended.stderr and "mode='process'" in ended.stderr


def test_a_program_runs_until_a_node_stops_it(mode: str, tmp_path: Path) -> None:
    class Adder:
        def add(self, a: int, b: int) -> int:
            return a + b

    def use(adder: Any) -> None:
        (tmp_path / "sum").write_text(str(adder.add(1, 2)))
        lp.stop()

    program = lp.Program("usage")
    adder = program.add_node(lp.CourierNode(Adder), label="adder")
    program.add_node(lp.PyNode(use, adder), label="user")
    run = lp.launch(program, mode)
    assert run.wait(WITHIN_S) is None
    assert (tmp_path / "sum").read_text() == "3"


def test_it_ends_when_all_nodes_have_finished(mode: str) -> None:
    program = lp.Program("short")
    for _ in range(3):
        with program.group("worker"):
            program.add_node(lp.PyNode(lambda: None))
    run = lp.launch(program, mode)
    run.wait(WITHIN_S)
    run.wait()  # again, and at once
    assert [row["state"] for row in run.status()["worker"]] == ["finished"] * 3


def test_launch_refuses_what_is_not_a_program_and_modes_that_it_does_not_know() -> None:
    program, _ = serving()
    with pytest.raises(TypeError, match="Program"):
        lp.launch("program", "thread")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'rocket'"):
        lp.launch(program, "rocket")
    with pytest.raises(ValueError, match="no nodes"):
        lp.launch(lp.Program("empty"), "thread")


def test_wait_gives_up_after_its_timeout_and_the_program_goes_on(mode: str) -> None:
    program, server = serving()
    run = lp.launch(program, mode)
    with pytest.raises(TimeoutError, match="server/0"):
        run.wait(0.05)
    assert run.client(server).add(1, 2) == 3
    run.stop()


def test_stop_ends_everything_quietly_and_may_be_called_again(mode: str) -> None:
    program, _ = serving(lp.PyNode(lambda: lp.wait_for_stop()))
    run = lp.launch(program, mode)
    run.stop()
    run.stop()
    run.wait()
    assert {row["state"] for rows in run.status().values() for row in rows} <= {"stopped", "finished"}


def test_the_context_manager_stops_on_exit(mode: str) -> None:
    program, server = serving()
    with lp.launch(program, mode) as run:
        assert run.client(server).name() == "the server"
    assert run.status()["server"][0]["state"] == "stopped"
    run.wait()


def test_a_clean_exit_of_the_body_raises_a_nodes_failure(mode: str) -> None:
    def fail() -> None:
        raise ValueError("broken")

    program, server = serving(lp.PyNode(fail))
    with pytest.raises(lp.NodeError, match="node0/0"), lp.launch(program, mode) as run:
        while run.status()["node0"][0]["state"] != "failed":
            with contextlib.suppress(lp.Unavailable):  # it goes down with the program
                run.client(server).add(1, 1)


def test_the_bodys_own_exception_wins(mode: str) -> None:
    def fail() -> None:
        raise ValueError("broken")

    program, _ = serving(lp.PyNode(fail))
    with pytest.raises(KeyError, match="mine"), lp.launch(program, mode):
        raise KeyError("mine")


def test_status_has_state_pid_and_error_of_every_node(mode: str) -> None:
    program, server = serving(lp.PyNode(lambda: None))
    with lp.launch(program, mode) as run:
        run.client(server).add(1, 1)
        status = run.status()
        assert list(status) == ["server", "node0"]
        (row,) = status["server"]
        assert (row["state"], row["error"]) == ("running", None)
        assert psutil.pid_exists(row["pid"])
        assert (row["pid"] == os.getpid()) == (mode == "thread")


def test_clients_of_nodes_by_handle_and_by_label(mode: str) -> None:
    program = lp.Program("two servers")
    with program.group("server"):
        handles = [program.add_node(lp.CourierNode(Server, name)) for name in ("first", "second")]
    program.add_node(lp.PyNode(lp.wait_for_stop), label="plain")
    with lp.launch(program, mode) as run:
        assert [run.client(handle).name() for handle in handles] == ["first", "second"]
        assert run.client("server").name() == "first"
        assert run.client("server", 1).name() == "second"
        assert handles[1].dereference().name() == "second"
        with pytest.raises(KeyError, match="nobody"):
            run.client("nobody")
        with pytest.raises(IndexError, match="server"):
            run.client("server", 2)
        with pytest.raises((NotImplementedError, TypeError), match=r"dereference|plain"):
            run.client("plain")


def test_the_launcher_waits_until_the_server_is_up(mode: str) -> None:
    class Slow:
        def __init__(self, path: Path) -> None:
            while not path.exists():
                assert not lp.wait_for_stop(0.01)

        def hello(self) -> str:
            return "hello"

    with lp.launch(*late(Slow, mode)) as run:
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(run.client("late").hello()))
        asking.start()
        asking.join(0.2)
        assert asking.is_alive()
        (run.run_dir / "go").touch()
        asking.join(WITHIN_S)
        assert answers == ["hello"]


def late(ctor: Callable[..., object], mode: str) -> tuple[lp.Program, str]:
    program = lp.Program("late")
    program.add_node(lp.CourierNode(lambda: ctor(lp.context().run_dir / "go")), label="late")
    return program, mode


def test_dereferencing_after_the_end_is_unavailable(mode: str) -> None:
    program, server = serving()
    with lp.launch(program, mode) as run:
        client = run.client(server)
        assert client.add(1, 1) == 2
    with pytest.raises(lp.Unavailable):
        server.dereference()
    with pytest.raises(lp.Unavailable):
        client.add(1, 1)


def test_dereferencing_a_failed_node_is_unavailable(mode: str) -> None:
    def broken() -> None:
        raise ValueError("no server today")

    program = lp.Program("broken")
    handle = program.add_node(lp.CourierNode(broken), label="server")
    run = lp.launch(program, mode)
    with pytest.raises(lp.Unavailable, match=r"server/0"):
        handle.dereference()
    with pytest.raises(lp.NodeError, match="no server today"):
        run.wait(WITHIN_S)


def test_several_programs_at_a_time_are_independent(mode: str, own_templates: None) -> None:
    (first, one), (second, two) = serving(program="first"), serving(program="second")
    run1, run2 = lp.launch(first, mode), lp.launch(second, mode)
    run1.client(one).add(1, 1)
    run1.stop()
    assert run2.client(two).add(1, 1) == 2
    run2.stop()


@pytest.mark.parametrize("name", ["x" * 300, "\u540d" * 100, "a/b\n../c"])
def test_a_program_may_have_any_name(name: str) -> None:
    """The run's folder is named after it, and file systems have limits."""
    program, handle = serving(program=name)
    with lp.launch(program, "thread") as run:
        assert run.client(handle).add(1, 2) == 3
        assert run.run_dir.parent == Path(os.environ["LP_PIPE_RUNS"]).resolve()


def test_the_same_program_may_be_launched_again(mode: str) -> None:
    program, server = serving()
    for _ in range(2):
        with lp.launch(program, mode) as run:
            assert run.client(server).add(1, 1) == 2


def test_nodes_know_who_they_are(mode: str) -> None:
    class WhoAmI:
        def ask(self) -> tuple[Any, ...]:
            here = lp.context()
            return here.label, here.index, here.group_size, str(here.run_dir), here.is_stopping, here.resources.threads

        def ask_from_a_thread(self) -> str:
            names: list[str] = []
            thread = threading.Thread(target=lambda: names.append(lp.context().name))
            thread.start()
            thread.join()
            return names[0]

        def ask_from_a_callback(self, other: Any) -> str:
            names: list[str] = []
            called = threading.Event()
            future = other.futures.ask()
            future.add_done_callback(lambda _: (names.append(lp.context().name), called.set()))
            assert called.wait(WITHIN_S)
            return names[0]

    program = lp.Program("who")
    with program.group("worker"):
        for _ in range(2):
            program.add_node(lp.CourierNode(WhoAmI))
    with lp.launch(program, mode) as run:
        first, second = run.client("worker", 0), run.client("worker", 1)
        assert first.ask() == ("worker", 0, 2, str(run.run_dir), False, 1)
        assert second.ask() == ("worker", 1, 2, str(run.run_dir), False, 1)
        for _ in range(3):
            assert (first.ask_from_a_thread(), second.ask_from_a_thread()) == ("worker/0", "worker/1")
            assert (first.ask_from_a_callback(second), second.ask_from_a_callback(first)) == ("worker/0", "worker/1")


@pytest.mark.parametrize(
    "ask",
    [
        lp.context,
        lp.stop,
        lp.stop_event,
        lp.wait_for_stop,
        lambda: lp.log_metrics({"a": 1}),
        lambda: lp.register_stop_handler(print),
        lambda: lp.unregister_stop_handler(print),
    ],
)
def test_outside_of_nodes_they_raise(ask: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="inside a running node"):
        ask()


def test_stop_works_from_a_constructor_and_from_a_handler_which_is_answered(mode: str) -> None:
    class StopsItself:
        def __init__(self) -> None:
            lp.stop()

    program = lp.Program("constructor")
    program.add_node(lp.CourierNode(StopsItself), label="server")
    lp.launch(program, mode).wait(WITHIN_S)

    class Stopper:
        def finish(self) -> str:
            lp.stop()
            assert lp.wait_for_stop(WITHIN_S)
            return "last words"

    program = lp.Program("handler")
    program.add_node(lp.CourierNode(Stopper), label="server")
    run = lp.launch(program, mode)
    assert run.client("server").finish() == "last words"
    run.wait(WITHIN_S)


def test_the_stop_event_reaches_run_methods_and_threads(mode: str) -> None:
    class Loop:
        def run(self) -> None:
            event = lp.stop_event()
            thread = threading.Thread(target=event.wait)
            thread.start()
            assert not lp.wait_for_stop(0.001)
            lp.stop()
            assert lp.wait_for_stop()
            assert lp.context().is_stopping
            thread.join()

    program = lp.Program("loop")
    program.add_node(lp.PyClassNode(Loop), label="loop")
    lp.launch(program, mode).wait(WITHIN_S)


def test_stop_handlers_run_in_order_before_the_node_counts_as_down(mode: str, tmp_path: Path) -> None:
    def note(word: str) -> None:
        with (tmp_path / "notes").open("a") as file:
            file.write(f"{word} in {lp.context().name}\n")

    def forgotten() -> None:
        note("forgotten")

    def broken() -> None:
        note("second")
        raise SystemExit("a handler that raises does not block the rest")

    def node() -> None:
        lp.register_stop_handler(lambda: note("first"))
        lp.register_stop_handler(forgotten)
        lp.register_stop_handler(broken)
        lp.register_stop_handler(lambda: note("third"))
        lp.unregister_stop_handler(forgotten)
        lp.stop()
        lp.wait_for_stop()

    program = lp.Program("handlers")
    program.add_node(lp.PyNode(node), label="node")
    lp.launch(program, mode).wait(WITHIN_S)
    expected = ["first in node/0", "second in node/0", "third in node/0"]
    assert (tmp_path / "notes").read_text().splitlines() == expected


def test_a_stop_handler_registered_after_the_stop_runs_at_once(mode: str, tmp_path: Path) -> None:
    def node() -> None:
        lp.stop()
        lp.wait_for_stop()
        done = threading.Event()
        lp.register_stop_handler(done.set)
        assert done.is_set()
        (tmp_path / "done").touch()

    program = lp.Program("late handler")
    program.add_node(lp.PyNode(node), label="node")
    lp.launch(program, mode).wait(WITHIN_S)
    assert (tmp_path / "done").exists()


def test_a_stop_handler_that_outlasts_the_grace_is_not_cut_off_in_silence(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The program was done, and nothing said that what a node saves at the stop had not been saved.
    def save() -> None:
        (tmp_path / "begun").touch()
        while not (tmp_path / "release").exists():
            time.sleep(0.01)

    def node() -> None:
        lp.register_stop_handler(save)
        lp.stop()
        lp.wait_for_stop()

    program = lp.Program("saves long")
    program.add_node(lp.PyNode(node), label="saver")
    with caplog.at_level(logging.WARNING):
        lp.launch(program, mode, grace=0.3).wait(WITHIN_S)
    (tmp_path / "release").touch()
    assert (tmp_path / "begun").exists()
    if mode == "thread":
        assert re.search(r"(?s)node saver/0: stop handlers did not end.*in save\n", caplog.text)
    else:
        assert "did not end within the grace of 0.3 s after the stop: saver/0" in caplog.text


def test_handlers_of_a_node_that_has_finished_are_forgotten(mode: str, tmp_path: Path) -> None:
    # In thread mode they ran at the program's stop, long after the node had counted as down.
    def node() -> None:
        lp.register_stop_handler(lambda: (tmp_path / "called").touch())

    program, server = serving(lp.PyNode(node))
    with lp.launch(program, mode) as run:
        while run.status()["node0"][0]["state"] != "finished":
            run.client(server).add(1, 1)
    assert not (tmp_path / "called").exists()


def test_metrics_go_to_a_file_and_to_the_sinks(mode: str) -> None:
    def train() -> None:
        for step in range(3):
            lp.log_metrics({"loss": 1.0 / (step + 1), "bad": float("nan")}, step=step)
        lp.log_metrics({"done": 1})

    seen = []
    program = lp.Program("metrics")
    program.add_node(lp.PyNode(train), label="trainer")
    run = lp.launch(program, mode, metrics_sinks=(seen.append,))
    run.wait(WITHIN_S)
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(line["node"], line["step"]) for line in lines] == [("trainer/0", step) for step in (0, 1, 2, None)]
    assert [line["values"] for line in lines[1::2]] == [{"loss": 0.5, "bad": "nan"}, {"done": 1.0}]
    assert [record.step for record in seen] == [0, 1, 2, None]


def test_a_node_without_run_serves_until_stop_and_with_run_until_that_returns(mode: str) -> None:
    class Finite(Server):
        def __init__(self) -> None:
            self._go = threading.Event()

        def go(self) -> None:
            self._go.set()

        def run(self) -> None:
            assert self._go.wait(WITHIN_S)

    program = lp.Program("finite")
    program.add_node(lp.CourierNode(Finite), label="finite")
    run = lp.launch(program, mode)
    client = run.client("finite")
    assert client.add(1, 2) == 3  # handlers overlap run()
    client.go()
    run.wait(WITHIN_S)
    assert run.status()["finite"][0]["state"] == "finished"


def test_a_call_in_progress_when_run_returns_is_still_answered(mode: str) -> None:
    class Finite:
        def __init__(self) -> None:
            self._called, self._over = threading.Event(), threading.Event()

        def work(self) -> str:
            self._called.set()
            assert self._over.wait(WITHIN_S)
            return "done"

        def run(self) -> None:
            assert self._called.wait(WITHIN_S)
            self._over.set()

    program = lp.Program("finite")
    program.add_node(lp.CourierNode(Finite), label="finite")
    run = lp.launch(program, mode)
    assert run.client("finite").work() == "done"
    run.wait(WITHIN_S)


def test_no_call_is_left_hanging_when_the_server_ends(mode: str) -> None:
    class Busy:
        def work(self) -> str:
            lp.wait_for_stop()
            return "done"

    program = lp.Program("busy")
    program.add_node(lp.CourierNode(Busy, courier_kwargs={"thread_pool_size": 2}), label="busy")
    with lp.launch(program, mode) as run:
        futures = [run.client("busy").futures.work() for _ in range(10)]
    for future in futures:
        error = future.exception(WITHIN_S)
        assert error is None or isinstance(error, lp.Unavailable)


def test_disabled_run_is_as_if_there_were_none(mode: str) -> None:
    class Runs(Server):
        def run(self) -> None:
            raise AssertionError("must not run")

    program = lp.Program("disabled")
    node = lp.CourierNode(Runs)
    node.disable_run()
    program.add_node(node, label="server")
    plain = lp.PyClassNode(Runs)
    plain.disable_run()
    program.add_node(plain, label="plain")
    with lp.launch(program, mode) as run:
        assert run.client("server").add(1, 1) == 2


def test_system_exit_zero_is_a_good_end_and_any_other_a_failure(mode: str) -> None:
    program = lp.Program("exits")
    program.add_node(lp.PyNode(sys.exit), label="none")
    program.add_node(lp.PyNode(sys.exit, 0), label="zero")
    run = lp.launch(program, mode)
    run.wait(WITHIN_S)
    assert run.status()["zero"][0]["state"] == "finished"
    program.add_node(lp.PyNode(sys.exit, 3), label="three")
    with pytest.raises(lp.NodeError, match=r"three/0.*SystemExit.*3"):
        lp.launch(program, mode).wait(WITHIN_S)


def test_a_run_folder_of_ones_own(mode: str, tmp_path: Path) -> None:
    program = lp.Program("folder")
    program.add_node(lp.PyNode(lambda: (lp.context().run_dir / "here").touch()), label="node")
    run = lp.launch(program, mode, run_dir=tmp_path / "a" / "b")
    run.wait(WITHIN_S)
    assert run.run_dir == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b" / "here").exists()


def test_stacks_show_where_every_node_is(mode: str) -> None:
    def waits_here() -> None:
        lp.wait_for_stop()

    program, server = serving(lp.PyNode(waits_here))
    with lp.launch(program, mode) as run:
        run.client(server).add(1, 1)
        deadline = time.monotonic() + WITHIN_S
        while "waits_here" not in (stacks := run.stacks()):
            assert time.monotonic() < deadline, stacks
        assert "node0/0" in stacks
        assert "server/0" in stacks


@pytest.mark.parametrize(
    ("node", "path"),
    [
        (lambda lock: lp.PyNode(print, 0, lock), r"args\[1\]"),
        (lambda lock: lp.PyNode(print, file=lock), r"argument '?file"),
        (lambda lock: lp.PyNode(print, {"inner": [0, lock]}), r"args\[0\]\['inner'\]\[1\]"),
        (lambda lock: lp.PyNode(lambda: lock), "closure variable 'lock'"),
        (lambda lock: lp.PyNode(functools.partial(print, lock)), r"args\[0\]"),
        (lambda lock: lp.CourierNode(Server, type("Config", (), {"lock": lock})), r"lock"),
    ],
)
def test_what_does_not_pickle_is_named_before_anything_starts(
    node: Callable[[object], lp.Node[Any]], path: str, tmp_path: Path, no_leaks: None
) -> None:
    program = lp.Program("unpicklable")
    program.add_node(lp.PyNode((tmp_path / "started").touch), label="innocent")
    program.add_node(node(threading.Lock()), label="culprit")
    for options in ({"mode": "process"}, {"mode": "thread", "serialize_py_nodes": True}):
        with pytest.raises(lp.SerializationError) as caught:
            lp.launch(program, **options)  # type: ignore[arg-type]
        first_line = str(caught.value).splitlines()[0]
        assert "culprit/0" in first_line
        assert re.search(path, first_line), first_line
        assert "lock" in first_line
        assert "innocent" not in str(caught.value)
    assert not (tmp_path / "started").exists()


class ExitsWhenPickled:
    def __getstate__(self) -> object:
        raise SystemExit(3)


def test_an_argument_that_exits_as_it_is_pickled_is_named(no_leaks: None) -> None:
    # The script ended with that status, without a word.
    program = lp.Program("exits")
    program.add_node(lp.PyNode(print, [0, ExitsWhenPickled()]), label="printer")
    with pytest.raises(lp.SerializationError, match=r"printer/0: .*args\[0\]\[1\] of type ExitsWhenPickled .*Exit: 3"):
        lp.launch(program, mode="process")


@functools.lru_cache
def cached(x: int) -> int:
    return x


def test_cached_functions_partials_and_bound_methods_are_fine(mode: str, tmp_path: Path) -> None:
    def use(function: Callable[[int], int], method: Callable[[], None]) -> None:
        assert function(3) == 3
        method()

    program = lp.Program("callables")
    program.add_node(lp.PyNode(functools.partial(use, cached, method=(tmp_path / "a").touch)), label="partial")
    program.add_node(lp.PyNode(cached, 4), label="cached")
    program.add_node(lp.PyNode((tmp_path / "b").touch), label="bound")
    lp.launch(program, mode, serialize_py_nodes=True).wait(WITHIN_S)
    assert (tmp_path / "a").exists()
    assert (tmp_path / "b").exists()


def test_in_thread_mode_arguments_are_shared(no_leaks: None) -> None:
    seen: list[threading.Lock] = []
    lock = threading.Lock()
    program = lp.Program("shared")
    program.add_node(lp.PyNode(seen.append, lock), label="node")
    lp.launch(program, "thread").wait(WITHIN_S)
    assert seen == [lock]


def test_in_thread_mode_there_is_one_number_of_compute_threads() -> None:
    program = lp.Program("threads")
    for label, threads in (("one", 1), ("two", 2)):
        with program.group(label, resources=lp.Resources(threads=threads)):
            program.add_node(lp.PyNode(print))
    with pytest.raises(ValueError, match="threads"):
        lp.launch(program, "thread")


def test_a_thread_that_does_not_end_is_left_behind_and_named(
    caplog: pytest.LogCaptureFixture, socket_home: Path
) -> None:
    begun, release = threading.Event(), threading.Event()

    def stubborn() -> None:
        begun.set()
        release.wait(WITHIN_S)

    program = lp.Program("stubborn")
    program.add_node(lp.PyNode(stubborn), label="stubborn")
    run = lp.launch(program, "thread", grace=0.1)
    assert begun.wait(WITHIN_S)
    with caplog.at_level(logging.WARNING):
        run.stop()
    release.set()
    assert "stubborn/0" in caplog.text
    assert "release.wait" in caplog.text
    run.wait()


def test_a_program_that_has_ended_is_not_kept_in_memory(mode: str) -> None:
    # The launcher kept every program's arguments for ever, to be able to say that its servers are gone.
    def launch_once() -> tuple[weakref.ref[Any], lp.CourierHandle]:
        argument = Server()
        program = lp.Program("memory")
        handle = program.add_node(lp.CourierNode(lambda held: held, argument), label="server")
        with lp.launch(program, mode) as run:
            run.client(handle).add(1, 1)
        return weakref.ref(argument), pickle.loads(pickle.dumps(handle))  # a copy without its node

    argument, handle = launch_once()
    deadline = time.monotonic() + WITHIN_S
    while argument() is not None:  # the node's thread may be at its last line
        gc.collect()
        assert time.monotonic() < deadline
    with pytest.raises(lp.Unavailable, match="server/0 has stopped"):
        handle.dereference()


def test_who_asks_for_a_node_that_another_ones_failure_has_ended_is_told_of_that_failure(mode: str) -> None:
    def fail() -> None:
        raise ValueError("no data")

    program = lp.Program("ended")
    handle = program.add_node(lp.CourierNode(Server), label="server")
    program.add_node(lp.PyNode(fail), label="reader")
    run = lp.launch(program, mode)
    with pytest.raises(lp.NodeError, match="no data"):
        run.wait()
    with pytest.raises(lp.Unavailable, match=r"server/0 has stopped: .* because node reader/0 failed: .*no data"):
        handle.dereference()


@pytest.mark.slow
def test_twenty_launches_leave_no_file_descriptor(mode: str) -> None:
    program, server = serving()

    def launch_once() -> None:
        with lp.launch(program, mode) as run:
            assert run.client(server).add(1, 1) == 2

    launch_once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        launch_once()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.mark.parametrize("grace", ["5", -1, float("nan"), None])
def test_a_grace_that_is_no_number_of_seconds_is_refused(grace: Any) -> None:
    # Only the stop met it: its thread died, and the nodes stayed.
    program = lp.Program("grace")
    program.add_node(lp.PyNode(lambda: None), label="node")
    with pytest.raises(ValueError, match="grace="):
        lp.launch(program, "thread", grace=grace)


def test_a_folder_belongs_to_one_run_at_a_time(no_leaks: None, tmp_path: Path) -> None:
    # Two would write into the same logs and metrics, and prune each other's checkpoints.
    def waiting(name: str) -> lp.Program:
        program = lp.Program(name)
        program.add_node(lp.PyNode(lp.wait_for_stop), label="node")
        return program

    lives_there = pytest.raises(lp.LaunchError, match=r"run_dir .*program 'first' \(process \d+\) still runs there")
    with lp.launch(waiting("first"), "thread", run_dir=tmp_path, listed=True), lives_there:
        lp.launch(waiting("second"), "thread", run_dir=tmp_path)
    lp.launch(waiting("third"), "thread", run_dir=tmp_path).stop()


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_children_that_the_script_forks_end_by_themselves(mode: str, no_leaks: None) -> None:
    """A DataLoader's workers took the script for ended: each warned so, and waited for a stop until it was killed."""
    program = lp.Program("forks")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="node")
    with lp.launch(program, mode) as run:
        child = multiprocessing.get_context("fork").Process(target=int)
        child.start()
        child.join(WITHIN_S)
        child.kill()
        child.join()
        assert child.exitcode == 0
        assert run.status()["node"][0]["state"] in ("starting", "running")


def unusable(ask: Callable[[], object]) -> bool:
    with pytest.raises(lp.Unavailable, match="was forked from"):
        ask()
    return True


def asked_in_a_fork() -> bool:
    """Return what a node's functions do in a child of the node's process."""
    with pytest.raises(RuntimeError, match="forked by the node"):
        lp.wait_for_stop()
    return unusable(lp.stop) and unusable(lambda: lp.log_metrics({"loss": 0.0}))


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_forked_child_leaves_the_run_to_its_parent(mode: str, no_leaks: None, tmp_path: Path) -> None:
    def fork() -> None:
        assert holds_in_a_fork(asked_in_a_fork)
        (tmp_path / "asked").touch()
        lp.wait_for_stop()

    def leave_with_block(run: lp.Run) -> bool:
        signal.alarm(int(WITHIN_S))  # else it would hang
        with run:
            pass
        with pytest.raises(ValueError, match="of the child"), run:
            raise ValueError("of the child")
        run.stop()
        return not run.request_stop()

    def ask(run: lp.Run) -> bool:
        signal.alarm(int(WITHIN_S))  # else it would hang
        return all(
            map(unusable, [run.wait, run.status, run.stacks, lambda: run.failure, lambda: run.last_lines("node", 0)])
        )

    program = lp.Program("forks")
    program.add_node(lp.PyNode(fork), label="node")
    with lp.launch(program, mode) as run:
        until((tmp_path / "asked").exists)
        assert holds_in_a_fork(lambda: leave_with_block(run))
        assert holds_in_a_fork(lambda: ask(run))
        subprocess.run(["true"], preexec_fn=run.stop, check=True, timeout=WITHIN_S)
        assert run.status()["node"][0]["state"] == "running"


def test_a_child_that_a_script_forks_ends_by_itself(script: Script) -> None:
    process = script(
        """
        import os, sys
        import lp_pipe as lp

        program = lp.Program("forks")
        program.add_node(lp.PyNode(lp.wait_for_stop), label="node")
        with lp.launch(program, "process") as run:
            if os.fork() == 0:
                sys.exit(7)
            status = os.waitstatus_to_exitcode(os.wait()[1])
            print(status, run.status()["node"][0]["state"] in ("starting", "running"))
        """
    )
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("7 True\n", 0)
