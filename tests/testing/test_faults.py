"""Faults between the nodes of real programs, in every mode: what their callers see, and that it ends with the fault."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
from lp_pipe.testing.plugin import Launched

pytestmark = pytest.mark.usefixtures("warm_bare_template")

SOON_S = 0.3
TIMEOUT_S = 1.0  # long enough for a call of two processes that share their cores
PATIENCE_S = 20.0


class Counter:
    def __init__(self) -> None:
        self._total = 0

    def add(self, amount: int) -> int:
        self._total += amount
        return self._total

    def count_to(self, number: int) -> Iterator[int]:
        yield from range(number)


class Caller:
    """Calls the counter from its own node."""

    def __init__(self, counter: lp.CourierClient) -> None:
        self._counter = counter

    def add(self, amount: int) -> int:
        return int(self._counter.add(amount))


Launcher = Callable[..., lp.Run]


def program(call_timeout: float | None = None, callers: int = 1) -> lp.Program:
    program = lp.Program("faulty")
    options = {"call_timeout": call_timeout}
    counter = program.add_node(lp.CourierNode(Counter, courier_client_kwargs=options), label="counter")
    for _ in range(callers):
        program.add_node(lp.CourierNode(Caller, counter), label="caller")
    return program


@pytest.fixture
def launch(mode: str, launched: Launched, faults: ModuleType) -> Launcher:
    def start(call_timeout: float | None = None, callers: int = 1) -> lp.Run:
        run = launched(program(call_timeout, callers), mode)
        run.client("counter")  # is up from here on: starting takes longer than the shortest of these timeouts
        return run

    return start


def is_waiting(future: "Future[Any]") -> bool:
    try:
        future.exception(SOON_S)
    except TimeoutError:
        return True
    return False


def test_a_dropped_call_is_never_handled(launch: Launcher, faults: ModuleType) -> None:
    run = launch(call_timeout=TIMEOUT_S)
    caller = run.client("caller")
    assert caller.add(1) == 1
    with faults.drop(run, "caller", "counter") as fault:
        with pytest.raises(lp.DeadlineExceeded):
            caller.add(10)
        assert caller.add(1) == 2
        assert fault.hits == 1
    assert caller.add(1) == 3
    assert fault.hits == 1


def test_the_handler_of_a_dropped_reply_has_run(launch: Launcher, faults: ModuleType) -> None:
    run = launch(call_timeout=TIMEOUT_S)
    caller = run.client("caller")
    with faults.drop(run, "counter", "caller", after=1) as fault:
        assert caller.add(1) == 1
        with pytest.raises(lp.DeadlineExceeded):
            caller.add(10)
        assert caller.add(1) == 12
    assert fault.hits == 1


def test_without_a_deadline_who_waits_for_a_dropped_message_waits_on(launch: Launcher, faults: ModuleType) -> None:
    run = launch()
    counter = run.client("counter")
    with faults.drop(run, faults.LAUNCHER, "counter", count=None) as fault:
        lost = [counter.futures.add(1) for _ in range(3)]
        assert is_waiting(lost[0])
        assert fault.hits == 3
    assert is_waiting(lost[0])  # a lost message stays lost
    assert counter.add(1) == 1


def test_an_item_of_a_stream_may_be_lost(launch: Launcher, faults: ModuleType) -> None:
    run = launch()
    with faults.drop(run, "counter", faults.LAUNCHER, after=2):  # the opening of the stream, and item 0
        assert list(run.client("counter").count_to(4)) == [0, 2, 3]


def test_only_the_nodes_that_are_named_are_struck(launch: Launcher, faults: ModuleType) -> None:
    run = launch(call_timeout=TIMEOUT_S, callers=2)
    first, second = run.client("caller", 0), run.client("caller", 1)
    with faults.drop(run, ("caller", 1), "counter", count=None):
        assert first.add(1) == 1
        with pytest.raises(lp.DeadlineExceeded):
            second.add(1)
        assert run.client("counter").add(1) == 2
    with faults.drop(run, "caller", "counter") as fault:  # one of each: the group's nodes are counted by themselves
        for client in (first, second):
            with pytest.raises(lp.DeadlineExceeded):
                client.add(1)
            client.add(1)
    assert fault.hits == 2


def test_delayed_messages_come_later_and_in_order(launch: Launcher, faults: ModuleType) -> None:
    run = launch()
    counter = run.client("counter")
    counter.add(0)
    with faults.delay(run, "counter", faults.LAUNCHER, seconds=SOON_S) as fault:
        started = time.monotonic()
        replies = [counter.futures.add(1) for _ in range(20)]
        arrived: list[int] = []
        for reply in replies:
            reply.add_done_callback(lambda done: arrived.append(done.result()))
        assert sorted(reply.result(PATIENCE_S) for reply in replies) == list(range(1, 21))
        took = time.monotonic() - started
        assert SOON_S <= took < 20 * SOON_S  # on their way together, not one after another
        assert fault.hits == 20
    counter.add(1)
    assert fault.hits == 20


def test_what_is_on_its_way_when_the_delay_ends_arrives_then(launch: Launcher, faults: ModuleType) -> None:
    run = launch()
    counter = run.client("counter")
    with faults.delay(run, faults.LAUNCHER, "counter", seconds=600):
        calls = [counter.futures.add(1) for _ in range(3)]
        assert is_waiting(calls[0])
    assert sorted(call.result(PATIENCE_S) for call in calls) == [1, 2, 3]  # handlers run side by side


def test_a_close_waits_for_its_turn_too(launch: Launcher, faults: ModuleType) -> None:
    run = launch()
    counter = run.client("counter")
    with faults.delay(run, "counter", faults.LAUNCHER, seconds=600):
        call = counter.futures.add(1)
        assert is_waiting(call)
        run.stop()
        assert is_waiting(call)  # the reply and the server's farewell are on their way
    assert call.result(PATIENCE_S) == 1


def test_the_lines_of_both_directions_add_up(launch: Launcher, faults: ModuleType) -> None:
    run = launch()
    caller = run.client("caller")
    caller.add(0)
    with faults.delay(run, "counter", "caller", 0.1), faults.delay(run, "caller", "counter", 0.2):
        started = time.monotonic()
        assert caller.add(1) == 1
        assert time.monotonic() - started >= 0.3


def test_a_cut_connection_fails_the_calls_on_it_and_new_ones_connect(launch: Launcher, faults: ModuleType) -> None:
    run = launch()
    counter = run.client("counter")
    with faults.drop(run, "counter", faults.LAUNCHER):
        pending = counter.futures.add(1)
        assert is_waiting(pending)
        assert faults.cut(run, faults.LAUNCHER, "counter") == 1
        with pytest.raises(lp.Unavailable, match="the test has cut the connection"):
            pending.result(PATIENCE_S)
    assert counter.add(1) == 2
    assert faults.cut(run, "caller", "counter") == 0  # they have not talked yet


def test_across_a_partition_calls_wait_until_it_heals(launch: Launcher, faults: ModuleType) -> None:
    run = launch()
    caller = run.client("caller")
    caller.add(1)
    with faults.partition(run, "caller", "counter") as fault:
        pending = caller.futures.add(1)
        assert is_waiting(pending)
        assert run.client("counter").add(1) == 2  # the others are not concerned
        assert fault.hits >= 2  # the connection that was cut, and attempts to connect again
    assert pending.result(PATIENCE_S) == 3


def test_a_client_that_does_not_wait_is_told_of_the_partition(launch: Launcher, faults: ModuleType) -> None:
    run = launch()
    counter = run._program.groups["counter"][0].create_handle()
    counter.set_client_kwargs(wait_for_ready=False)
    client = run.client(counter)
    assert client.add(1) == 1
    with (
        faults.partition(run, faults.EVERYONE, counter),
        pytest.raises(lp.Unavailable, match=r"has separated '\(everyone\)'"),
    ):
        client.add(1)
    assert client.add(1) == 2


def test_a_fault_lasts_until_it_is_healed_or_the_test_ends(launch: Launcher, faults: ModuleType) -> None:
    run = launch(call_timeout=TIMEOUT_S)
    counter = run.client("counter")
    fault = faults.partition(run, faults.LAUNCHER, "counter")
    with pytest.raises(lp.DeadlineExceeded):
        counter.add(1)
    fault.heal()
    hits = fault.hits
    assert hits
    assert counter.add(1) == 1
    fault.heal()
    assert fault.hits == hits
    faults.partition(run, faults.LAUNCHER, "counter")  # left to the fixture


def test_hits_are_known_after_the_program_has_ended_of_the_fault(
    mode: str, launched: Launched, faults: ModuleType
) -> None:
    class Slow:
        def __init__(self) -> None:
            self._asked = threading.Event()

        def answer(self) -> None:
            self._asked.set()
            lp.wait_for_stop()

        def is_asked(self) -> bool:
            return self._asked.is_set()

    program = lp.Program("ends")
    slow = program.add_node(lp.CourierNode(Slow), label="slow")
    program.add_node(lp.PyNode(lambda client: client.answer(), slow), label="eager")
    run = launched(program, mode)
    while not run.client("slow").is_asked():
        pass
    with faults.partition(run, "eager", "slow") as fault:
        with pytest.raises(lp.NodeError, match="the test has separated"):
            run.wait(PATIENCE_S)
        assert fault.hits
    assert fault.hits


def test_large_arguments_survive_a_delay_though_the_caller_reuses_them(
    mode: str, launched: Launched, faults: ModuleType
) -> None:
    class First:
        def first(self, data: Any) -> int:
            return int(data[0])

    program = lp.Program("first")
    program.add_node(lp.CourierNode(First), label="first")
    run = launched(program, mode)
    client = run.client("first")
    data = np.ones(1_000_000)
    with faults.delay(run, faults.LAUNCHER, "first", SOON_S):
        reply = client.futures.first(data)
        data[:] = 7
        assert reply.result(PATIENCE_S) == 1


def test_nodes_are_named_as_everywhere(launch: Launcher, faults: ModuleType) -> None:
    run = launch(callers=2)
    with pytest.raises(KeyError, match=r"no group 'nobody'.*counter, caller"):
        faults.cut(run, "nobody", "counter")
    with pytest.raises(IndexError, match="group 'caller' has no node 2"):
        faults.cut(run, ("caller", 2), "counter")
    with pytest.raises(ValueError, match=r"other/0.* another program"):
        faults.cut(run, lp.Program("other").add_node(lp.CourierNode(Counter), label="other"), "counter")
    with pytest.raises(ValueError, match="never connected: they are one node"):  # "neither serves calls", it said
        faults.drop(run, "counter", "counter")


def test_numbers_that_make_no_sense_are_refused(launch: Launcher, faults: ModuleType) -> None:
    run = launch()
    with pytest.raises(ValueError, match="count=0"):
        faults.drop(run, "caller", "counter", count=0)
    with pytest.raises(ValueError, match="after=-1"):
        faults.drop(run, "caller", "counter", after=-1)
    with pytest.raises(ValueError, match="seconds=0"):
        faults.delay(run, "caller", "counter", 0)


def test_two_nodes_that_serve_nothing_cannot_be_separated(mode: str, launched: Launched, faults: ModuleType) -> None:
    program = lp.Program("mute")
    for label in ("one", "other"):
        program.add_node(lp.PyNode(lp.wait_for_stop), label=label)
    run = launched(program, mode)
    with pytest.raises(ValueError, match="neither side serves"):
        faults.partition(run, "one", "other")


def test_a_program_that_was_launched_without_faults_says_so(mode: str, launched: Launched) -> None:
    from lp_pipe.testing import faults

    run = launched(program(), mode)
    with pytest.raises(RuntimeError, match="fixture `faults`"):
        faults.cut(run, "caller", "counter")


def test_faults_after_the_end_of_enabled_are_refused(mode: str, launched: Launched) -> None:
    """Regression: in thread mode they silently struck nothing: connections that are made later are ordinary ones."""
    from lp_pipe.testing import faults

    with faults.enabled():
        run = launched(program(), mode)
    with pytest.raises(RuntimeError, match="has ended: the faults belong inside"):
        faults.drop(run, "caller", "counter")
