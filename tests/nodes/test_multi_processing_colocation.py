"""Several nodes as one: in a process each, in every launch mode."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import lp_pipe as lp
from tests.conftest import Script
from tests.waiting import until

WITHIN_S = 20.0
# What is between the colocation and its inner processes is the same in both modes; what is around it others prove.
mostly_in_processes = pytest.mark.parametrize(
    "mode", [pytest.param("thread", marks=pytest.mark.slow), "process"], indirect=True
)


class Adder:
    def add(self, a: int, b: int) -> int:
        return a + b

    def pid(self) -> int:
        return os.getpid()


class UntilStop:
    """Notes in files that it has started, and that it was stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def run(self) -> None:
        self._path.with_suffix(".started").write_text(str(os.getpid()))
        assert lp.wait_for_stop(WITHIN_S)
        self._path.write_text("stopped")


class Flaky:
    """Fails `failures` times, each time in a new process; leaves a line for each life."""

    def __init__(self, path: Path, failures: int) -> None:
        with path.open("a") as file:
            file.write(f"{os.getpid()}\n")
        self._is_bad = len(path.read_text().split()) <= failures

    def run(self) -> None:
        if self._is_bad:
            raise ValueError("not yet")


def program_of(colocation: lp.Node[Any], **options: Any) -> lp.Program:
    program = lp.Program("colocation")
    with program.group("both", **options):
        program.add_node(colocation)
    return program


def launched(mode: str, colocation: lp.Node[Any], **options: Any) -> lp.Run:
    return lp.launch(program_of(colocation), mode, **options)


def row_of(run: lp.Run) -> dict[str, Any]:
    (row,) = run.status()["both"]
    return row


def test_inner_nodes_have_a_process_each_and_call_each_other_and_others_them(mode: str, tmp_path: Path) -> None:
    def use(first: Any, second: Any, outside: Any, path: Path) -> None:
        assert first.add(1, 2) == second.add(2, 1) == outside.add(0, 3) == 3
        path.write_text(f"{lp.context().name} {lp.context().group_size}")

    program = lp.Program("colocation")
    outside = program.add_node(lp.CourierNode(Adder), label="outside")
    colocation = lp.MultiProcessingColocation([lp.PyNode(time.sleep, 0)], num_retries_on_failure=1)
    first = colocation.add_node(lp.CourierNode(Adder))
    second = colocation.add_node(lp.CourierNode(Adder))
    colocation.add_node(lp.PyNode(use, first, second, outside, tmp_path / "used"))
    program.add_node(colocation, label="both")

    def drive(first: Any, second: Any, outside: Any, path: Path) -> None:
        assert first.add(3, 4) == 7
        pids = {os.getpid(), first.pid(), second.pid(), outside.pid()}
        path.write_text(str(len(pids)))
        until((tmp_path / "used").exists)
        lp.stop()

    program.add_node(lp.PyNode(drive, first, second, outside, tmp_path / "pids"), label="driver")
    assert [(label, len(nodes)) for label, nodes in program.groups.items()] == [
        ("outside", 1), ("both", 1), ("driver", 1)
    ]  # fmt: skip
    run = lp.launch(program, mode)
    run.wait(WITHIN_S)
    assert (tmp_path / "used").read_text() == "both/0 1"
    assert (tmp_path / "pids").read_text() == ("3" if mode == "thread" else "4")
    assert {label: len(rows) for label, rows in run.status().items()} == {"outside": 1, "both": 1, "driver": 1}


def test_the_launcher_reaches_inner_nodes_by_handle(mode: str) -> None:
    colocation = lp.MultiProcessingColocation()
    handles = [colocation.add_node(lp.CourierNode(Adder)) for _ in range(2)]
    with launched(mode, colocation) as run:
        pids = [run.client(handle).pid() for handle in handles]
        assert len({os.getpid(), *pids}) == 3
        until(lambda: row_of(run)["state"] == "running")
        assert row_of(run)["pid"] == pids[0]
        assert "both/0" in repr(handles[0])
    assert row_of(run)["state"] == "stopped"


def test_it_ends_when_all_inner_nodes_have(mode: str) -> None:
    run = launched(mode, lp.MultiProcessingColocation([lp.PyNode(time.sleep, 0.2), lp.PyNode(dict)]))
    run.wait(WITHIN_S)
    assert row_of(run)["state"] == "finished"
    assert row_of(run)["restarts"] == 0


@mostly_in_processes
def test_arguments_are_built_once_and_travel_as_for_any_node(mode: str, tmp_path: Path) -> None:
    factor = 3  # captured: functions travel by value

    def write(adder: Any, numbers: list[int]) -> None:
        (tmp_path / "sum").write_text(str(factor * adder.add(*numbers)))

    colocation = lp.MultiProcessingColocation()
    adder = colocation.add_node(lp.CourierNode(Adder))
    colocation.add_node(lp.PyNode(lambda: write(adder.dereference(), [1, 2])))
    with launched(mode, colocation):
        until(lambda: (tmp_path / "sum").exists() and (tmp_path / "sum").read_text() == "9")


def test_clients_travel_between_threads_and_inner_processes(mode: str) -> None:
    class Relay:
        def add_with(self, adder: Any, a: int, b: int) -> tuple[int, int]:
            return adder.add(a, b), adder.pid()

    program = lp.Program("travel")
    outside = program.add_node(lp.CourierNode(Adder), label="outside")
    colocation = lp.MultiProcessingColocation()
    inside, relay = colocation.add_node(lp.CourierNode(Adder)), colocation.add_node(lp.CourierNode(Relay))
    program.add_node(colocation, label="both")
    with lp.launch(program, mode) as run:
        for adder in (run.client(outside), run.client(inside)):
            assert run.client(relay).add_with(adder, 1, 2) == (3, adder.pid())


def test_an_inner_failure_is_the_colocations_and_its_peers_are_stopped(mode: str, tmp_path: Path) -> None:
    def fail() -> None:
        until((tmp_path / "a.started").exists)
        raise KeyError("no such layer")

    nodes = [lp.PyClassNode(UntilStop, tmp_path / "a"), lp.CourierNode(Adder), lp.PyNode(fail)]
    run = launched(mode, lp.MultiProcessingColocation(nodes))
    with pytest.raises(lp.NodeError, match="no such layer") as caught:
        run.wait(WITHIN_S)
    assert (caught.value.label, caught.value.index, caught.value.type_name) == ("both", 0, "KeyError")
    assert "both/0" in str(caught.value)
    assert "in fail" in caught.value.remote_traceback
    assert (tmp_path / "a").read_text() == "stopped"
    assert (row_of(run)["state"], row_of(run)["error"]) == ("failed", "KeyError: 'no such layer'")


def test_a_killed_inner_process_is_the_colocations_failure(mode: str, tmp_path: Path) -> None:
    colocation = lp.MultiProcessingColocation([lp.PyClassNode(UntilStop, tmp_path / "a")])
    victim = colocation.add_node(lp.CourierNode(Adder))
    colocation.add_node(lp.PyNode(print, "hello"))
    run = launched(mode, colocation)
    until((tmp_path / "a.started").exists)
    os.kill(run.client(victim).pid(), signal.SIGKILL)
    with pytest.raises(lp.NodeError, match="SIGKILL") as caught:
        run.wait(WITHIN_S)
    assert (caught.value.label, caught.value.index) == ("both", 0)
    assert (tmp_path / "a").read_text() == "stopped"


@mostly_in_processes
def test_a_peer_that_does_not_stop_is_killed_after_the_grace(mode: str, tmp_path: Path) -> None:
    def never_ends() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    def fail() -> None:
        until((tmp_path / "pid").exists)
        raise ValueError("enough")

    began = time.monotonic()
    with pytest.raises(lp.NodeError, match="enough"):
        launched(mode, lp.MultiProcessingColocation([lp.PyNode(never_ends), lp.PyNode(fail)]), grace=0.3).wait(WITHIN_S)
    assert time.monotonic() - began < 10
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@mostly_in_processes
def test_inner_nodes_are_tried_again_before_their_failure_counts(mode: str, tmp_path: Path) -> None:
    nodes = [lp.PyClassNode(Flaky, tmp_path / "lives", 2), lp.PyClassNode(Flaky, tmp_path / "well", 0)]
    run = launched(mode, lp.MultiProcessingColocation(nodes, num_retries_on_failure=2))
    run.wait(WITHIN_S)
    assert len(set((tmp_path / "lives").read_text().split())) == 3
    assert len((tmp_path / "well").read_text().split()) == 1
    assert (row_of(run)["state"], row_of(run)["restarts"]) == ("finished", 2)


@mostly_in_processes
def test_a_killed_inner_node_is_tried_again_and_its_clients_wait_for_it(mode: str) -> None:
    colocation = lp.MultiProcessingColocation(num_retries_on_failure=1)
    handle = colocation.add_node(lp.CourierNode(Adder))
    other = colocation.add_node(lp.CourierNode(Adder))
    with launched(mode, colocation) as run:
        pids = run.client(handle).pid(), run.client(other).pid()
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: row_of(run)["restarts"] == 1)
        assert run.client(handle).pid() != pids[0]
        assert run.client(other).pid() == pids[1]


@mostly_in_processes
def test_when_no_retry_is_left_the_failure_counts(mode: str, tmp_path: Path) -> None:
    nodes = [lp.PyClassNode(Flaky, tmp_path / "lives", 9), lp.CourierNode(Adder)]
    run = launched(mode, lp.MultiProcessingColocation(nodes, num_retries_on_failure=2))
    with pytest.raises(lp.NodeError, match="not yet") as caught:
        run.wait(WITHIN_S)
    assert (caught.value.label, caught.value.index) == ("both", 0)
    assert len((tmp_path / "lives").read_text().split()) == 3
    assert (row_of(run)["state"], row_of(run)["restarts"]) == ("failed", 2)


def test_a_stop_reaches_every_inner_node_and_leaves_nothing(mode: str, tmp_path: Path) -> None:
    nodes = [lp.PyClassNode(UntilStop, tmp_path / str(index)) for index in range(3)]
    run = launched(mode, lp.MultiProcessingColocation(nodes))
    started = until(lambda: len(found := list(tmp_path.glob("*.started"))) == 3 and found)
    pids = [int(until(path.read_text)) for path in started]
    run.stop()
    run.wait(WITHIN_S)
    assert [(tmp_path / str(index)).read_text() for index in range(3)] == ["stopped"] * 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_an_inner_node_may_stop_the_program(mode: str) -> None:
    nodes = [lp.PyNode(lp.stop), lp.CourierNode(Adder)]
    program = program_of(lp.MultiProcessingColocation(nodes))
    program.add_node(lp.CourierNode(Adder), label="outside")
    lp.launch(program, mode).wait(WITHIN_S)


def test_a_restarting_group_restarts_the_whole_colocation(mode: str, tmp_path: Path) -> None:
    colocation = lp.MultiProcessingColocation(num_retries_on_failure=1)
    handle, other = (colocation.add_node(lp.CourierNode(Adder)) for _ in range(2))
    colocation.add_node(lp.PyClassNode(UntilStop, tmp_path / "a"))
    colocation.add_node(lp.PyClassNode(Flaky, tmp_path / "finished", 0))
    with lp.launch(program_of(colocation, on_failure="restart"), mode) as run:
        pids = run.client(handle).pid(), run.client(other).pid()
        until((tmp_path / "a.started").exists)
        until(lambda: (tmp_path / "finished").exists() and (tmp_path / "finished").read_text())
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: row_of(run)["restarts"] == 1)  # a retry: it alone
        second = run.client(handle).pid()
        assert run.client(other).pid() == pids[1]
        os.kill(second, signal.SIGKILL)
        until(lambda: row_of(run)["restarts"] == 2 and row_of(run)["state"] == "running")  # all of them
        assert run.client(handle).pid() not in (pids[0], second)
        assert run.client(other).pid() != pids[1]
        until(lambda: len((tmp_path / "finished").read_text().split()) == 2)
        assert (tmp_path / "a").read_text() == "stopped"
        os.kill(run.client(handle).pid(), signal.SIGKILL)  # its retries begin anew
        until(lambda: row_of(run)["restarts"] == 3)
        assert run.client(handle).add(1, 1) == 2
    assert row_of(run)["state"] == "stopped"


@mostly_in_processes
def test_a_restart_of_the_colocation_kills_parts_that_do_not_stop(mode: str, tmp_path: Path) -> None:
    def never_ends() -> None:
        with (tmp_path / "pids").open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(60)

    def lives() -> list[str]:
        return (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []

    colocation = lp.MultiProcessingColocation([lp.PyNode(never_ends)])
    handle = colocation.add_node(lp.CourierNode(Adder))
    with lp.launch(program_of(colocation, on_failure="restart"), mode, grace=0.3) as run:
        until(lives)
        os.kill(run.client(handle).pid(), signal.SIGKILL)
        until(lambda: len(lives()) == 2)
        assert not psutil.pid_exists(int(lives()[0]))
        assert row_of(run)["restarts"] == 1


@mostly_in_processes
def test_an_ignored_failure_ends_the_whole_colocation_and_no_other_node(mode: str, tmp_path: Path) -> None:
    colocation = lp.MultiProcessingColocation([lp.PyClassNode(UntilStop, tmp_path / "a")])
    handle = colocation.add_node(lp.CourierNode(Adder))
    other = colocation.add_node(lp.CourierNode(Adder))
    program = program_of(colocation, on_failure="ignore")
    outside = program.add_node(lp.CourierNode(Adder), label="outside")
    with lp.launch(program, mode) as run:
        until((tmp_path / "a.started").exists)
        run.client(other).pid()
        os.kill(run.client(handle).pid(), signal.SIGKILL)
        until((tmp_path / "a").exists)
        until(lambda: row_of(run)["state"] == "failed")
        assert run.client(outside).add(1, 2) == 3
        with pytest.raises(lp.Unavailable, match="both/0"):
            until(lambda: run.client(other).add(0, 0))
    assert row_of(run)["state"] == "failed"
    assert "SIGKILL" in row_of(run)["error"]


@mostly_in_processes
def test_threads_and_processes_nest(mode: str, tmp_path: Path) -> None:
    def pids_of(*adders: Any) -> None:
        (tmp_path / "pids").write_text(" ".join(str(adder.pid()) for adder in adders))
        lp.stop()

    threads = lp.MultiThreadingColocation()
    processes = lp.MultiProcessingColocation()
    inner = [part.add_node(lp.CourierNode(Adder)) for part in (threads, threads, processes, processes)]
    colocation = lp.MultiProcessingColocation([threads, processes])
    outer = colocation.add_node(lp.CourierNode(Adder))
    colocation.add_node(lp.PyNode(pids_of, *inner, outer))
    run = launched(mode, colocation)
    run.wait(WITHIN_S)
    first, second, *others = (tmp_path / "pids").read_text().split()
    assert first == second
    assert len({first, *others, str(os.getpid())}) == 5
    assert len(run.status()["both"]) == 1


def test_processes_inside_threads(mode: str, tmp_path: Path) -> None:
    def pids_of(*adders: Any) -> None:
        (tmp_path / "pids").write_text(" ".join(str(adder.pid()) for adder in adders))
        lp.stop()

    processes = lp.MultiProcessingColocation()
    inside = processes.add_node(lp.CourierNode(Adder))
    colocation = lp.MultiThreadingColocation([lp.MultiThreadingColocation([processes])])
    beside = [colocation.add_node(lp.CourierNode(Adder)) for _ in range(2)]
    colocation.add_node(lp.PyNode(pids_of, *beside, inside))
    run = launched(mode, colocation)
    run.wait(WITHIN_S)
    first, second, third = (tmp_path / "pids").read_text().split()
    assert first == second != third
    assert len(run.status()["both"]) == 1
    assert row_of(run)["state"] == "stopped"


@mostly_in_processes
def test_threads_end_once_the_processes_among_them_have(mode: str) -> None:
    processes = lp.MultiProcessingColocation([lp.PyNode(time.sleep, 0.2), lp.PyNode(dict)])
    run = launched(mode, lp.MultiThreadingColocation([processes, lp.PyNode(dict)]))
    run.wait(WITHIN_S)
    assert row_of(run)["state"] == "finished"


@mostly_in_processes
@pytest.mark.parametrize("is_first", [True, False], ids=["processes end first", "threads end first"])
def test_threads_may_end_with_the_first_processes_included(mode: str, tmp_path: Path, is_first: bool) -> None:
    brief, patient = lp.PyNode(dict), lp.PyClassNode(UntilStop, tmp_path / "a")
    processes = lp.MultiProcessingColocation([brief if is_first else patient])
    program = program_of(
        lp.MultiThreadingColocation([processes, patient if is_first else brief], return_on_first_completed=True)
    )
    program.add_node(lp.PyNode(lp.wait_for_stop), label="other")
    with lp.launch(program, mode) as run:  # the program goes on
        until(lambda: row_of(run)["state"] in ("finished", "stopped"))
        assert run.status()["other"][0]["state"] == "running"
    stopped = (tmp_path / "a").read_text() if (tmp_path / "a.started").exists() else "stopped"
    assert stopped == "stopped"


def test_a_failure_in_a_process_inside_threads_is_the_colocations(mode: str, tmp_path: Path) -> None:
    processes = lp.MultiProcessingColocation([lp.PyNode(int, "x")])
    run = launched(mode, lp.MultiThreadingColocation([processes, lp.CourierNode(Adder)]))
    with pytest.raises(lp.NodeError, match="invalid literal") as caught:
        run.wait(WITHIN_S)
    assert (caught.value.label, caught.value.index) == ("both", 0)


def test_an_empty_one_cannot_be_launched(mode: str) -> None:
    for empty in (
        lp.MultiProcessingColocation(),
        lp.MultiProcessingColocation([lp.MultiProcessingColocation()]),
        lp.MultiThreadingColocation([lp.MultiProcessingColocation()]),
    ):
        with pytest.raises(ValueError, match="both/0"):
            launched(mode, empty)


def test_only_nodes_each_only_once_and_no_negative_retries() -> None:
    with pytest.raises(TypeError, match="takes nodes"):
        lp.MultiProcessingColocation([print])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="takes nodes"):
        lp.MultiProcessingColocation().add_node(print)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_retries_on_failure .*got -1"):
        lp.MultiProcessingColocation(num_retries_on_failure=-1)
    node = lp.PyNode(print)
    colocation = lp.MultiProcessingColocation([node])
    with pytest.raises(ValueError, match="already in"):
        colocation.add_node(node)
    with pytest.raises(NotImplementedError, match="n/0"):
        lp.Program("p").add_node(colocation, label="n").dereference()


def test_what_does_not_pickle_is_named_through_the_colocation_in_every_mode(mode: str) -> None:
    inner = lp.MultiProcessingColocation([lp.PyNode(print), lp.PyNode(print, 1, {"key": threading.Lock()})])
    program = program_of(lp.MultiProcessingColocation([lp.PyNode(print), inner]))
    program.add_node(lp.PyNode(print), label="innocent")
    with pytest.raises(
        lp.SerializationError, match=r"nodes\[1\].*nodes\[1\].*args\[1\]\['key'\] of type lock"
    ) as caught:
        lp.launch(program, mode)
    assert str(caught.value).splitlines()[0].startswith("both/0: ")
    assert "innocent" not in str(caught.value)


def test_stacks_logs_and_metrics_cover_the_inner_nodes(
    mode: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def speak_and_wait(word: str) -> None:
        print(word)
        lp.log_metrics({word: 1.0})
        lp.wait_for_stop()

    run = launched(mode, lp.MultiProcessingColocation([lp.PyNode(speak_and_wait, word) for word in ("one", "two")]))
    until(lambda: (run.run_dir / "metrics.jsonl").exists())
    until(lambda: len((run.run_dir / "metrics.jsonl").read_text().splitlines()) == 2)
    stacks = until(lambda: (text := run.stacks()).count("speak_and_wait") >= 2 and text)
    run.stop()
    assert "node both/0.0\n" in stacks
    assert "node both/0.1\n" in stacks
    assert (run.run_dir / "logs" / "both-0.1.log").read_text() == "two\n"
    assert run.log_path("both", 0) == run.run_dir / "logs" / "both-0.0.log"
    assert "[both/0.1] two" in capfd.readouterr().out
    assert (run.run_dir / "metrics.jsonl").read_text().count('"both/0"') == 2


def test_in_thread_mode_calls_between_threads_stay_in_the_process(no_leaks: None) -> None:
    program = program_of(lp.MultiProcessingColocation([lp.CourierNode(Adder)]))
    outside = program.add_node(lp.CourierNode(Adder), label="outside")
    with lp.launch(program, "thread") as run:
        assert run.client(outside).pid() == os.getpid()
        assert not [thread for thread in threading.enumerate() if "outside" in thread.name and "read" in thread.name]


@pytest.mark.parametrize("launch_mode", [pytest.param("thread", marks=pytest.mark.slow), "process"])
def test_a_launcher_that_is_killed_leaves_no_inner_process(launch_mode: str, tmp_path: Path, script: Script) -> None:
    launcher = script(
        f"""
        import os, pathlib, subprocess, time
        import lp_pipe as lp

        folder = pathlib.Path({str(tmp_path)!r})

        def stubborn(name):
            child = subprocess.Popen(["sleep", "60"])
            (folder / name).with_suffix(".pids").write_text(f"{{os.getpid()}} {{child.pid}}")
            (folder / name).with_suffix(".pids").rename(folder / name)
            time.sleep(60)

        program = lp.Program("orphans")
        nodes = [lp.PyNode(stubborn, "first"), lp.PyNode(stubborn, "second")]
        program.add_node(lp.MultiProcessingColocation(nodes), label="both")
        program.add_node(lp.PyNode(lp.wait_for_stop), label="other")
        lp.launch(program, {launch_mode!r}).wait()
        """
    )
    until(lambda: (tmp_path / "first").exists() and (tmp_path / "second").exists())
    pids = [int(pid) for name in ("first", "second") for pid in (tmp_path / name).read_text().split()]
    os.kill(launcher.pid, signal.SIGKILL)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


@mostly_in_processes
def test_a_restarting_group_restarts_threads_with_the_processes_among_them(mode: str, tmp_path: Path) -> None:
    def lives(name: str) -> int:
        return len((tmp_path / name).read_text().split()) if (tmp_path / name).exists() else 0

    processes = lp.MultiProcessingColocation([lp.PyClassNode(Flaky, tmp_path / "inside", 1)])
    handle = processes.add_node(lp.CourierNode(Adder))
    colocation = lp.MultiThreadingColocation([processes])
    beside = colocation.add_node(lp.CourierNode(Adder))
    colocation.add_node(lp.PyClassNode(Flaky, tmp_path / "beside", 2))
    with lp.launch(program_of(colocation, on_failure="restart", max_restarts=9), mode) as run:
        until(lambda: lives("beside") >= 3 and lives("inside") >= 2 and row_of(run)["state"] == "running")
        assert run.client(handle).add(1, 1) == run.client(beside).add(1, 1) == 2
        assert 1 <= row_of(run)["restarts"] <= 3
    assert row_of(run)["state"] == "stopped"


def test_a_template_that_dies_takes_the_colocation_down_as_its_failure(mode: str, tmp_path: Path) -> None:
    colocation = lp.MultiProcessingColocation(num_retries_on_failure=3)
    handle = colocation.add_node(lp.CourierNode(Adder))
    colocation.add_node(lp.CourierNode(Adder))
    run = launched(mode, colocation)
    os.kill(psutil.Process(run.client(handle).pid()).ppid(), signal.SIGKILL)
    with pytest.raises(lp.NodeError, match="template") as caught:
        run.wait(WITHIN_S)
    assert caught.value.label == "both"


@mostly_in_processes
def test_the_same_program_may_run_twice_at_a_time(mode: str, own_templates: None) -> None:
    colocation = lp.MultiProcessingColocation()
    handle = colocation.add_node(lp.CourierNode(Adder))
    program = program_of(colocation)
    outside = program.add_node(lp.CourierNode(Adder), label="outside")
    with lp.launch(program, mode), lp.launch(program, mode) as second:
        assert second.client(handle).add(1, 2) == second.client(outside).add(2, 1) == 3
