"""A thread that is interrupted in the middle of a call: by code that calls itself, or that raises, at any bytecode."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
from lp_pipe.connections.credentials import Credentials
from lp_pipe.rpc import Server
from tests.connections.carriers import own_loopback

WITHIN_S = 20.0
_OURS = str(Path(lp.__file__).parent)

Operation = Callable[[], object]


class Stop(Exception):
    """An exception of a signal handler."""


class Target:
    def add(self, a: int, b: int) -> int:
        return a + b

    def echo(self, value: Any) -> Any:
        return value

    def count(self, to: int) -> Iterator[int]:
        yield from range(to)


class Interrupter:
    """Runs `action` once, before bytecode number `at` that lp_pipe executes in this thread."""

    def __init__(self, at: int, action: Operation) -> None:
        self.has_struck = False
        self._left = at
        self._action = action

    def run(self, operation: Operation) -> object:
        previous = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return operation()
        finally:
            sys.settrace(previous)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace_opcode

    def _trace_opcode(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode" and not self.has_struck:
            self._left -= 1
            if self._left < 0:
                self.has_struck = True
                sys.settrace(None)
                self._action()
        return self._trace_opcode


def at_many_places(operation: Operation, action: Operation, check: Callable[[object], None], step: int) -> None:
    """Interrupt the operation once at each place, `step` bytecodes apart; `check` gets what came of it.

    In a thread of its own: raising as an `except` clause begins leaves CPython with that exception as the context of
    all later ones in the thread, which other tests would see.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            _at_many_places(operation, action, check, step)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def _at_many_places(operation: Operation, action: Operation, check: Callable[[object], None], step: int) -> None:
    at = 0
    while True:
        one = Interrupter(at, action)
        try:
            outcome = one.run(operation)
        except (Stop, TypeError) as error:  # TypeError: CPython's own, where a callback of a weak reference raises
            outcome = error
        check(outcome)
        if not one.has_struck:
            return
        at += step


@pytest.fixture(params=["inproc", "unix", "tls"])
def client(
    request: pytest.FixtureRequest, socket_home: Path, run_credentials: Credentials
) -> Iterator[lp.CourierClient]:
    where = f"{own_loopback()}:0" if request.param == "tls" else f"{socket_home}/server"
    server = Server(Target(), f"{request.param}:{where}", thread_pool_size=4)
    yield lp.CourierClient(server.endpoint, call_timeout=WITHIN_S)
    server.close()


_ARRAY = np.zeros(100_000)  # goes through shared memory where there is one
_OPERATIONS: dict[str, tuple[Callable[[lp.CourierClient], object], object]] = {
    "call": (lambda client: client.add(1, 2), 3),
    "large": (lambda client: client.echo(_ARRAY).shape, (100_000,)),
    "future": (lambda client: client.futures.add(1, 2).result(WITHIN_S), 3),
    "stream": (lambda client: [*client.count(3)], [0, 1, 2]),
    "connect": (lambda client: lp.CourierClient(client.address, call_timeout=WITHIN_S).add(1, 2), 3),
}


def _is_usable(client: lp.CourierClient) -> None:
    assert client.add(3, 4) == 7
    assert client.futures.add(3, 4).result(WITHIN_S) == 7
    assert [*client.count(3)] == [0, 1, 2]


@pytest.mark.parametrize("kind", _OPERATIONS)
def test_code_that_interrupts_a_call_may_call(client: lp.CourierClient, kind: str) -> None:
    operation, expected = _OPERATIONS[kind]

    def check(outcome: object) -> None:
        assert outcome == expected

    at_many_places(lambda: operation(client), lambda: _is_usable(client), check, step=31)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised in a weak reference's callback
@pytest.mark.parametrize("kind", _OPERATIONS)
def test_code_that_interrupts_a_call_may_raise(client: lp.CourierClient, kind: str) -> None:
    operation, _ = _OPERATIONS[kind]

    def interrupt() -> None:
        raise Stop

    def check(outcome: object) -> None:
        results: list[int] = []
        other = threading.Thread(target=lambda: results.append(client.add(5, 5)), daemon=True)
        other.start()
        other.join(WITHIN_S)
        assert results == [10], "another thread cannot call"
        _is_usable(client)

    at_many_places(lambda: operation(client), interrupt, check, step=41)


@pytest.mark.parametrize("kind", ["call", "future", "stream"])
def test_code_that_interrupts_a_call_may_ask_for_a_future_of_before(client: lp.CourierClient, kind: str) -> None:
    operation, expected = _OPERATIONS[kind]
    _is_usable(client)
    earlier = [client.futures.add(3, 4)]

    def interrupt() -> None:
        try:
            assert earlier[0].result(WITHIN_S) == 7
        except lp.Unavailable as error:  # in the middle of a frame nothing else can be read
            assert "interrupted" in str(error)

    def check(outcome: object) -> None:
        assert outcome == expected
        assert earlier[0].result(WITHIN_S) == 7
        earlier[0] = client.futures.add(3, 4)

    at_many_places(lambda: operation(client), interrupt, check, step=31)


def test_a_del_in_the_thread_that_reads_may_call(client: lp.CourierClient) -> None:
    called = threading.Event()

    class Dropped:
        def __del__(self) -> None:
            assert client.add(1, 1) == 2
            called.set()

    def drop(future: object) -> None:
        holder.clear()

    holder = [Dropped()]
    future = client.futures.add(1, 2)
    future.add_done_callback(drop)
    assert future.result(WITHIN_S) == 3
    assert called.wait(WITHIN_S)


class Store:
    def __init__(self) -> None:
        self.saved = threading.Semaphore(0)

    def work(self, value: int) -> int:
        """Takes until the signal's handler has saved, for odd values."""
        if value % 2:
            assert self.saved.acquire(timeout=WITHIN_S)
        return value

    def save(self) -> str:
        self.saved.release()
        return "saved"


def _trainer(store: Any) -> None:
    answers = []

    def handle(number: int, frame: object) -> None:
        answers.append(store.save())
        answers.append(store.futures.save().result(WITHIN_S))
        lp.log_metrics({"saved": 1.0})

    signal.signal(signal.SIGUSR1, handle)
    for value in range(4):
        if value % 2:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        assert store.work(value) == value
    until = time.monotonic() + WITHIN_S
    while len(answers) < 4:  # the last one may still be under way
        assert time.monotonic() < until
        time.sleep(0.01)
    assert answers == ["saved"] * 4

    class TimeIsUp(Exception):
        pass

    def give_up(number: int, frame: object) -> None:
        raise TimeIsUp

    signal.signal(signal.SIGUSR1, give_up)
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    for _ in range(4):
        store.saved_is_used_up()
    with pytest.raises(TimeIsUp):
        store.work(1)
    assert store.work(2) == 2
    store.save()  # the call that was given up ends
    lp.stop()


class CountingStore(Store):
    def saved_is_used_up(self) -> None:
        self.saved.acquire(blocking=False)


def test_a_signal_handler_of_a_node_calls_while_its_main_thread_waits(without_torch: None) -> None:
    program = lp.Program("signals")
    store = program.add_node(lp.CourierNode(CountingStore), label="store")
    program.add_node(lp.PyNode(_trainer, store), label="trainer")
    lp.launch(program, "process").wait(60)
