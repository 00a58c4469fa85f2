"""Several nodes as one: in threads of one process, in every launch mode."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from tests.waiting import until

WITHIN_S = 20.0


class Adder:
    def add(self, a: int, b: int) -> int:
        return a + b

    def pid(self) -> int:
        return os.getpid()


class UntilStop:
    """Notes in a file that it was stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def run(self) -> None:
        self._path.with_suffix(".started").touch()
        assert lp.wait_for_stop(WITHIN_S)
        self._path.write_text("stopped")


def launched(mode: str, colocation: lp.MultiThreadingColocation, **options: Any) -> lp.Run:
    program = lp.Program("colocation")
    program.add_node(colocation, label="both")
    return lp.launch(program, mode, **options)


def test_inner_nodes_call_each_other_and_share_a_process(mode: str, tmp_path: Path) -> None:
    def use(first: Any, second: Any, path: Path) -> None:
        assert first.add(1, 2) == second.add(2, 1) == 3
        assert first.pid() == os.getpid()
        path.write_text(lp.context().name)

    colocation = lp.MultiThreadingColocation([lp.PyNode(time.sleep, 0)])
    first = colocation.add_node(lp.CourierNode(Adder))
    nested = lp.MultiThreadingColocation()
    second = nested.add_node(lp.CourierNode(Adder))
    colocation.add_node(nested)
    colocation.add_node(lp.PyNode(use, first, second, tmp_path / "used"))
    program = lp.Program("colocation")
    program.add_node(colocation, label="both")

    def outside(adder: Any) -> None:
        while not (tmp_path / "used").exists():
            time.sleep(0.01)
        assert adder.add(3, 4) == 7
        lp.stop()

    program.add_node(lp.PyNode(outside, second), label="outside")
    run = lp.launch(program, mode)
    run.wait(WITHIN_S)
    assert (tmp_path / "used").read_text() == "both/0"
    assert list(run.status()) == ["both", "outside"]
    assert len(run.status()["both"]) == 1


def test_the_launcher_reaches_inner_nodes_by_handle(mode: str) -> None:
    colocation = lp.MultiThreadingColocation()
    handle = colocation.add_node(lp.CourierNode(Adder))
    with launched(mode, colocation) as run:
        assert run.client(handle).add(1, 1) == 2
        assert "both/0" in repr(handle)


def test_it_ends_when_all_inner_nodes_have(mode: str) -> None:
    launched(mode, lp.MultiThreadingColocation([lp.PyNode(time.sleep, 0), lp.PyNode(dict)])).wait(WITHIN_S)


def test_it_may_end_with_the_first(mode: str, tmp_path: Path) -> None:
    nodes = [lp.PyNode(dict), lp.PyClassNode(UntilStop, tmp_path / "a"), lp.CourierNode(Adder)]
    launched(mode, lp.MultiThreadingColocation(nodes, return_on_first_completed=True)).wait(WITHIN_S)
    assert (tmp_path / "a").read_text() == "stopped"


def test_an_inner_failure_is_the_colocations_and_its_peers_are_stopped(mode: str, tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("no such layer")

    nodes = [lp.PyClassNode(UntilStop, tmp_path / "a"), lp.CourierNode(Adder), lp.PyNode(fail)]
    with pytest.raises(lp.NodeError, match="no such layer") as caught:
        launched(mode, lp.MultiThreadingColocation(nodes)).wait(WITHIN_S)
    assert (caught.value.label, caught.value.index, caught.value.type_name) == ("both", 0, "ValueError")
    assert "in fail" in caught.value.remote_traceback
    assert (tmp_path / "a").read_text() == "stopped"


def test_the_failure_is_the_cause_and_not_its_echo(mode: str) -> None:
    class Dies:
        def run(self) -> None:
            lp.context()
            time.sleep(0.1)
            raise ValueError("the cause")

        def wait(self) -> None:
            lp.wait_for_stop(WITHIN_S)

    colocation = lp.MultiThreadingColocation()
    handle = colocation.add_node(lp.CourierNode(Dies))
    colocation.add_node(lp.PyNode(lambda client: client.wait(), handle))
    with pytest.raises(lp.NodeError, match="the cause"):
        launched(mode, colocation).wait(WITHIN_S)


def test_a_peer_that_does_not_stop_is_left_behind_after_the_grace(mode: str) -> None:
    release = threading.Event() if mode == "thread" else None

    def never_ends() -> None:
        if release is not None:
            release.wait(WITHIN_S)
        else:
            time.sleep(WITHIN_S)

    colocation = lp.MultiThreadingColocation([lp.PyNode(never_ends), lp.PyNode(int, "x")])
    began = time.monotonic()
    with pytest.raises(lp.NodeError, match="ValueError"):
        launched(mode, colocation, grace=0.5).wait(WITHIN_S)
    assert time.monotonic() - began < 10
    if release is not None:
        release.set()


def test_a_stop_reaches_every_inner_node(mode: str, tmp_path: Path) -> None:
    nodes = [lp.PyClassNode(UntilStop, tmp_path / str(index)) for index in range(3)]
    run = launched(mode, lp.MultiThreadingColocation(nodes))
    until(lambda: len(list(tmp_path.glob("*.started"))) == 3)
    run.stop()
    run.wait(WITHIN_S)
    assert [(tmp_path / str(index)).read_text() for index in range(3)] == ["stopped"] * 3


def test_what_does_not_pickle_is_named_through_the_colocation() -> None:
    inner = lp.MultiThreadingColocation([lp.PyNode(print), lp.PyNode(print, 1, threading.Lock())])
    program = lp.Program("colocation")
    program.add_node(lp.MultiThreadingColocation([inner]), label="both")
    with pytest.raises(lp.SerializationError, match=r"both/0: .*nodes\[1\].*args\[1\] of type lock"):
        lp.launch(program, "process")


def test_an_empty_colocation_fails_at_launch(mode: str) -> None:
    with pytest.raises(lp.NodeError, match="at least one"):
        launched(mode, lp.MultiThreadingColocation()).wait(WITHIN_S)


def test_only_nodes_and_each_only_once() -> None:
    with pytest.raises(TypeError, match="takes nodes"):
        lp.MultiThreadingColocation([print])  # type: ignore[list-item]
    node = lp.PyNode(print)
    colocation = lp.MultiThreadingColocation([node])
    with pytest.raises(ValueError, match="already in"):
        colocation.add_node(node)
    with pytest.raises(ValueError, match="inside a colocation"):
        lp.Program("p").add_node(node, label="n")
    with pytest.raises(NotImplementedError, match="n/0"):
        lp.Program("p").add_node(colocation, label="n").dereference()
