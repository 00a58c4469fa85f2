"""kill and freeze: what can be done to a process, and is refused for a thread."""

import time
from types import ModuleType
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.testing.plugin import Launched

SOON_S = 0.3
PATIENCE_S = 20.0

pytestmark = pytest.mark.usefixtures("warm_bare_template", "no_leaks")


class Counter:
    def __init__(self) -> None:
        self._total = 0

    def add(self, amount: int) -> int:
        self._total += amount
        return self._total


class Caller:
    def __init__(self, counter: lp.CourierClient) -> None:
        self._counter = counter

    def add(self, amount: int) -> int:
        return int(self._counter.add(amount))


def program(**options: Any) -> lp.Program:
    program = lp.Program("counting")
    with program.group("counter", **options):
        counter = program.add_node(lp.CourierNode(Counter))
    program.add_node(lp.CourierNode(Caller, counter), label="caller")
    return program


def test_a_killed_node_ends_the_program(launched: Launched, faults: ModuleType) -> None:
    run = launched(program(), "process")
    faults.kill(run, "counter")  # also before it has said a word
    with pytest.raises(lp.NodeError, match=r"counter/0.*SIGKILL"):
        run.wait(PATIENCE_S)


def test_a_killed_node_comes_back_where_its_group_restarts(launched: Launched, faults: ModuleType) -> None:
    run = launched(program(on_failure="restart"), "process")
    caller = run.client("caller")
    assert [caller.add(1), caller.add(1)] == [1, 2]
    faults.kill(run, "counter")
    reply = None
    while reply is None:
        try:
            reply = caller.add(1)
        except lp.Unavailable:  # the call that was in progress
            continue
    assert reply == 1
    assert run.status()["counter"][0]["restarts"] == 1


def test_a_fault_holds_for_the_node_that_comes_back(launched: Launched, faults: ModuleType) -> None:
    program = lp.Program("back")
    counter = program.add_node(lp.CourierNode(Counter), label="counter")
    with program.group("caller", on_failure="restart"):
        program.add_node(lp.CourierNode(Caller, counter))
    run = launched(program, "process")
    caller = run.client("caller")
    caller.add(1)
    with faults.partition(run, "caller", "counter") as fault:
        faults.kill(run, "caller")
        while not run.status()["caller"][0]["restarts"]:
            pass
        pending = caller.futures.add(1)
        while not fault.hits:  # refused in the new process: what the old one had counted went with it
            pass
        assert not pending.done()
    assert pending.result(PATIENCE_S) == 2


def test_a_frozen_node_answers_when_it_is_thawed(launched: Launched, faults: ModuleType) -> None:
    run = launched(program(), "process")
    caller = run.client("caller")
    caller.add(1)
    with faults.freeze(run, "counter") as fault:
        pending = caller.futures.add(1)
        with pytest.raises(TimeoutError):
            pending.result(SOON_S)
        assert fault.hits == 1
    assert pending.result(PATIENCE_S) == 2


def test_a_node_that_is_frozen_first_thing_has_a_server(launched: Launched, faults: ModuleType) -> None:
    # Frozen in its constructor it had none yet, and run.client() in the test waited for that for ever.
    class SlowToStart(Counter):
        def __init__(self) -> None:
            super().__init__()
            lp.wait_for_stop(SOON_S)

    slow = lp.Program("slow")
    slow.add_node(lp.CourierNode(SlowToStart), label="counter")
    run = launched(slow, "process")
    with faults.freeze(run, "counter"):
        pending = run.client("counter").futures.add(1)
        with pytest.raises(TimeoutError):
            pending.result(SOON_S)
    assert pending.result(PATIENCE_S) == 1


def test_a_frozen_node_is_thawed_before_its_program_is_stopped(launched: Launched, faults: ModuleType) -> None:
    run = launched(program(), "process")
    run.client("counter").add(1)
    faults.freeze(run, "counter")
    faults.heal_all()
    started = time.monotonic()
    run.stop()
    assert time.monotonic() - started < 4.0  # within the grace: nobody had to be killed


def test_a_node_that_does_not_answer_is_named(
    launched: Launched, faults: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_PATIENCE_S", SOON_S)
    run = launched(program(), "process")
    run.client("counter").add(1)
    with faults.freeze(run, "counter"), pytest.raises(RuntimeError, match=r"counter/0 has not answered.*frozen"):
        faults.partition(run, "caller", "counter")


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_a_thread_cannot_be_killed_or_frozen(launched: Launched, faults: ModuleType, fault: str) -> None:
    run = launched(program(), "thread")
    with pytest.raises(ValueError, match=r"counter/0 is a thread.*mode='process'"):
        getattr(faults, fault)(run, "counter")


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_neither_can_the_test_itself(launched: Launched, faults: ModuleType, fault: str) -> None:
    run = launched(program(), "process")
    with pytest.raises(ValueError, match="the launcher runs this test"):
        getattr(faults, fault)(run, faults.LAUNCHER)


def test_a_node_that_has_ended_cannot_be_killed(launched: Launched, faults: ModuleType) -> None:
    program = lp.Program("short")
    program.add_node(lp.PyNode(int), label="short")
    run = launched(program, "process")
    run.wait(PATIENCE_S)
    with pytest.raises(ValueError, match=r"short/0 .*finished"):
        faults.kill(run, "short")
