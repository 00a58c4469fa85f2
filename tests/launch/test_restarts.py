"""Groups whose nodes may fail: restarted while their clients wait, or ignored while the others go on."""

import atexit
import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import lp_pipe as lp
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("warm_bare_template")

WITHIN_S = 20.0
# Two xdist workers, a hundred processes each, on two cores: what the product promises, and what the machine takes.
SLACK_S = 2.0


class Counter:
    """Counts from 0 after each restart; leaves a line in `births` for each construction."""

    def __init__(self, births: Path) -> None:
        with births.open("a") as file:
            file.write(f"{os.getpid()}\n")
        self._lives = len(births.read_text().split())
        self._count = 0
        self._end = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        while not self._end.wait(0.01) and not lp.stop_event().is_set():
            pass
        if self._error is not None:
            raise self._error

    def count(self) -> int:
        self._count += 1
        return self._count

    def lives(self) -> int:
        return self._lives

    def fail(self) -> None:
        self._error = ValueError("asked to")
        self._end.set()

    def wait(self) -> None:
        lp.wait_for_stop()


def fail(counter: Any) -> None:
    with contextlib.suppress(lp.Unavailable):  # the reply is as quick as the end
        counter.fail()


def counting(births: Path, on_failure: str, **options: Any) -> lp.Program:
    program = lp.Program("counting")
    with program.group("counter", on_failure=on_failure, **options):
        program.add_node(lp.CourierNode(Counter, births))
    return program


def row_of(run: lp.Run, label: str = "counter") -> dict[str, Any]:
    return run.status()[label][0]


def test_a_failed_node_starts_from_its_constructor_again_and_clients_reach_the_new_one(
    mode: str, tmp_path: Path
) -> None:
    with lp.launch(counting(tmp_path / "births", "restart"), mode) as run:
        client = run.client("counter")
        assert [client.count(), client.count()] == [1, 2]
        fail(client)
        until(lambda: row_of(run)["restarts"] == 1)
        assert client.count() == 1  # waited for it, and began anew
        assert run.client("counter").count() == 2
        until(lambda: row_of(run)["state"] == "running")
        assert (row_of(run)["restarts"], row_of(run)["error"]) == (1, "ValueError: asked to")
    births = (tmp_path / "births").read_text().split()
    assert len(births) == 2
    assert (len(set(births)) == 2) == (mode == "process")


def test_nodes_reach_a_restarted_node_as_well(mode: str, tmp_path: Path) -> None:
    def drive(counter: Any, done: Path) -> None:
        for lives in (1, 2, 3):
            fail(counter)
            while True:
                try:
                    if counter.lives() > lives:
                        break
                except lp.Unavailable:  # the call was in progress when it ended
                    continue
        done.write_text("three lives")
        lp.stop()

    program = lp.Program("nodes")
    with program.group("counter", on_failure="restart"):
        counter = program.add_node(lp.CourierNode(Counter, tmp_path / "births"))
    program.add_node(lp.PyNode(drive, counter, tmp_path / "done"), label="driver")
    run = lp.launch(program, mode)
    run.wait(WITHIN_S)
    assert (tmp_path / "done").read_text() == "three lives"
    assert row_of(run)["restarts"] == 3


def test_calls_in_progress_raise_unavailable_and_are_not_sent_again(mode: str, tmp_path: Path) -> None:
    class Slow:
        def __init__(self) -> None:
            self._fail = threading.Event()

        def run(self) -> None:
            lp.register_stop_handler(self._fail.set)
            self._fail.wait()
            if not lp.stop_event().is_set():
                raise ValueError("asked to")

        def work(self) -> None:
            with (tmp_path / "calls").open("a") as file:
                file.write("call\n")
            self._fail.set()
            lp.wait_for_stop()

    program = lp.Program("in progress")
    with program.group("slow", on_failure="restart"):
        program.add_node(lp.CourierNode(Slow))
    with lp.launch(program, mode) as run:
        with pytest.raises(lp.Unavailable, match="slow/0"):
            run.client("slow").work()
        until(lambda: row_of(run, "slow")["state"] == "running" and row_of(run, "slow")["restarts"] == 1)
        assert lp.list_methods(run.client("slow")) == ["run", "work"]
    assert (tmp_path / "calls").read_text() == "call\n"


def test_after_max_restarts_the_failure_is_the_programs(mode: str, tmp_path: Path) -> None:
    def fail() -> None:
        with (tmp_path / "lives").open("a") as file:
            file.write("x")
        raise ValueError("every time")

    program = lp.Program("hopeless")
    with program.group("node", on_failure="restart", max_restarts=2):
        program.add_node(lp.PyNode(fail))
    program.add_node(lp.PyNode(lp.wait_for_stop), label="other")
    start = time.monotonic()
    run = lp.launch(program, mode)
    with pytest.raises(lp.NodeError, match="every time") as caught:
        run.wait(WITHIN_S)
    assert caught.value.label == "node"
    assert (tmp_path / "lives").read_text() == "xxx"
    assert time.monotonic() - start >= 2 * 0.1  # the least back-off; how it grows: test_lifecycle
    assert (row_of(run, "node")["state"], row_of(run, "node")["restarts"]) == ("failed", 2)
    assert row_of(run, "other")["state"] == "stopped"


def test_a_stop_ends_the_back_off_and_who_waits_for_the_node(mode: str, tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("always")

    program = lp.Program("back-off")
    with program.group("counter", on_failure="restart", max_restarts=10**6):
        program.add_node(lp.CourierNode(fail))
    run = lp.launch(program, mode)
    until(lambda: row_of(run)["restarts"] >= 4 and row_of(run)["state"] == "restarting")  # for 0.8 s
    waiting: list[BaseException] = []

    def wait_for_client() -> None:
        try:
            run.client("counter")
        except lp.Unavailable as error:
            waiting.append(error)

    waiter = threading.Thread(target=wait_for_client)
    waiter.start()
    start = time.monotonic()
    run.stop()
    waiter.join(WITHIN_S)
    assert time.monotonic() - start < 4.0  # below the grace
    assert row_of(run)["state"] == "stopped"
    assert "counter/0" in str(waiting[0])
    run.wait(0)


def test_a_node_that_ends_well_is_not_restarted(mode: str) -> None:
    program = lp.Program("well")
    with program.group("node", on_failure="restart"):
        program.add_node(lp.PyNode(lambda: None))
    run = lp.launch(program, mode)
    run.wait(WITHIN_S)
    assert (row_of(run, "node")["state"], row_of(run, "node")["restarts"]) == ("finished", 0)


def test_an_ignored_failure_is_in_the_status_and_the_log_and_the_others_go_on(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = tmp_path / "asked"

    def ask(counter: Any) -> None:
        fail(counter)
        while True:
            try:
                counter.count()
            except lp.Unavailable as error:
                if "asked to" in str(error):
                    asked.write_text(str(error))
                    return

    program = lp.Program("ignored")
    with program.group("counter", on_failure="ignore"):
        counter = program.add_node(lp.CourierNode(Counter, tmp_path / "births"))
    program.add_node(lp.PyNode(ask, counter), label="asker")
    run = lp.launch(program, mode)
    run.wait(WITHIN_S)  # it ends when all others have ended
    assert (row_of(run)["state"], row_of(run)["error"]) == ("failed", "ValueError: asked to")
    assert row_of(run, "asker")["state"] == "finished"
    assert "node counter/0 failed: ValueError: asked to" in asked.read_text()
    assert "node counter/0 failed: ValueError: asked to; the program goes on without it" in caplog.text
    assert run.later_failures == 0


@pytest.mark.usefixtures("no_leaks")
def test_a_killed_process_is_restarted_under_another_pid(tmp_path: Path) -> None:
    with lp.launch(counting(tmp_path / "births", "restart"), "process") as run:
        client = run.client("counter")
        pids = []
        for restarts in (1, 2, 3):
            client.count()
            pids.append(row_of(run)["pid"])
            call = client.futures.wait()
            client.count()  # the connection is in order: the call above has arrived
            os.kill(pids[-1], signal.SIGKILL)
            with pytest.raises(lp.Unavailable):
                call.result(WITHIN_S)
            until(lambda restarts=restarts: row_of(run)["restarts"] == restarts)
            assert client.count() == 1
        assert len({*pids, row_of(run)["pid"]}) == 4
        assert "SIGKILL" in row_of(run)["error"]


@pytest.mark.usefixtures("no_leaks")
class Unloadable:
    """Ends the process that loads it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return signal.raise_signal, (self._number,)


def test_a_node_whose_loading_crashes_its_process_has_two_tries(without_torch: None) -> None:
    program = lp.Program("crashing")
    with program.group("node", on_failure="restart", max_restarts=None):
        program.add_node(lp.PyNode(print, Unloadable(signal.SIGSEGV)))
    with pytest.raises(lp.NodeError, match="SIGSEGV") as caught:
        (run := lp.launch(program, "process")).wait(WITHIN_S)
    assert (caught.value.label, run.status()["node"][0]["restarts"]) == ("node", 1)


def test_a_restarting_node_has_no_pid_and_turns_impatient_clients_away(tmp_path: Path) -> None:
    program = lp.Program("down")
    with program.group("counter", on_failure="restart", max_restarts=20):
        handle = program.add_node(lp.CourierNode(Counter, tmp_path / "births"))
    with lp.launch(program, "process") as run:
        client = run.client("counter")
        impatient = lp.CourierClient(client.address, wait_for_ready=False)
        for restarts in range(1, 4):
            fail(client)
            until(lambda restarts=restarts: row_of(run)["restarts"] == restarts)
            until(lambda: run.client(handle).count() == 1)
        fail(client)
        until(lambda: row_of(run)["state"] == "restarting" and row_of(run)["pid"] == 0)
        with pytest.raises(lp.Unavailable):
            impatient.count()
        assert client.count() == 1


@pytest.mark.usefixtures("no_leaks")
def test_a_server_that_a_grandchild_keeps_open_is_restarted_all_the_same() -> None:
    # A child that was forked and has left the session outlives its node with the node's sockets in its hands: calls
    # would connect to a listener that nobody serves, and wait for ever.
    class Forking:
        def __init__(self) -> None:
            self._calls = 0

        def fork(self) -> int:
            if (pid := os.fork()) == 0:
                os.setsid()
                time.sleep(60)
                os._exit(0)
            return pid

        def count(self) -> int:
            self._calls += 1
            return self._calls

    program = lp.Program("forking")
    with program.group("server", on_failure="restart"):
        program.add_node(lp.CourierNode(Forking, courier_kwargs={"thread_pool_size": 1}))
    with lp.launch(program, "process") as run:
        client = run.client("server")
        grandchild = client.fork()
        until(lambda: os.getsid(grandchild) == grandchild)
        os.kill(row_of(run, "server")["pid"], signal.SIGKILL)
        until(lambda: row_of(run, "server")["restarts"] == 1)
        assert run.client("server").count() == 1


@pytest.mark.usefixtures("no_leaks")
def test_exit_functions_that_hang_hold_a_restart_up_for_the_grace_only(tmp_path: Path) -> None:
    def fail_once() -> None:
        if not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            atexit.register(time.sleep, 60)
            raise ValueError("once")

    program = lp.Program("exit functions")
    with program.group("node", on_failure="restart"):
        program.add_node(lp.PyNode(fail_once))
    run = lp.launch(program, "process", grace=0.5)
    run.wait(WITHIN_S)
    assert (row_of(run, "node")["state"], row_of(run, "node")["restarts"]) == ("finished", 1)


@pytest.mark.usefixtures("no_leaks")
def test_fresh_interpreters_are_restarted_too(tmp_path: Path) -> None:
    program = counting(tmp_path / "births", "restart", resources=lp.Resources(fresh_interpreter=True))
    with lp.launch(program, "process") as run:
        client = run.client("counter")
        assert client.lives() == 1
        fail(client)
        until(lambda: row_of(run)["restarts"] == 1)
        assert client.lives() == 2


@pytest.mark.usefixtures("no_leaks")
def test_a_lost_template_is_the_end_also_of_nodes_that_would_be_restarted(tmp_path: Path) -> None:
    run = lp.launch(counting(tmp_path / "births", "restart"), "process")
    run.client("counter")
    os.kill(psutil.Process(row_of(run)["pid"]).ppid(), signal.SIGKILL)
    with pytest.raises(lp.NodeError, match="template"):
        run.wait(WITHIN_S)
    assert row_of(run)["state"] == "failed"


@pytest.mark.usefixtures("no_leaks")
def test_fifty_processes_killed_at_once_are_reported_within_two_seconds() -> None:
    class Stubborn:
        """Leaves a process behind that keeps its pipes and its stream open."""

        def __init__(self) -> None:
            if os.fork() == 0:
                os.setsid()
                time.sleep(60)
                os._exit(0)

    program = lp.Program("fifty")
    with program.group("node", on_failure="ignore"):
        for _ in range(50):
            program.add_node(lp.CourierNode(Stubborn))
    with lp.launch(program, "process") as run:
        for index in range(50):
            run.client("node", index)
        for row in run.status()["node"]:
            os.kill(row["pid"], signal.SIGKILL)
        start = time.monotonic()
        until(lambda: all(row["state"] == "failed" for row in run.status()["node"]))
        assert time.monotonic() - start < 2.0 + SLACK_S
    assert all("SIGKILL" in row["error"] for row in run.status()["node"])
