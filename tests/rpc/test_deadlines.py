"""The timers of calls: they come in order, do not pile up, and stay with the process that set them."""

import datetime
import math
import signal
import threading
import time

import pytest

from lp_pipe.connections.io_thread import IoThread
from lp_pipe.rpc import deadlines
from tests.forking import holds_in_a_fork

WITHIN_S = 10


def test_deadlines_of_calls_that_are_over_do_not_pile_up() -> None:
    # With call_timeout=3600 every future kept half a kilobyte for an hour.
    some = IoThread()
    over: set[int] = set()
    for call in range(20_000):
        some.at(time.monotonic() + 3600, lambda: None, lambda call=call: call not in over)  # type: ignore[misc]
        over.add(call)
    assert len(some._timers) < 2000


def test_those_that_are_needed_stay_and_come_in_order() -> None:
    some = IoThread()
    done: list[str] = []
    is_done = threading.Event()
    for _ in range(5000):
        some.at(time.monotonic() + 3600, lambda: None, lambda: False)
    soon = time.monotonic() + 0.05
    some.at(soon + 0.01, is_done.set)
    some.at(soon, lambda: done.append("first"), lambda: True)
    for _ in range(5000):
        some.at(time.monotonic() + 3600, lambda: None, lambda: False)
    assert is_done.wait(WITHIN_S)
    assert done == ["first"]


def test_a_forked_child_leaves_the_deadlines_to_its_parent() -> None:
    # A data loader's worker that called another node with a limit also ran its parent's batches.
    some = IoThread()
    done: list[str] = []
    is_done = threading.Event()
    soon = time.monotonic() + 0.05
    some.at(soon, lambda: done.append("the parent's"))

    def has_its_own() -> bool:
        signal.alarm(WITHIN_S)  # it may also have waited for the lock of a thread that it does not have
        some.at(soon + 0.01, is_done.set)
        return is_done.wait(WITHIN_S) and not done

    assert holds_in_a_fork(has_its_own)


@pytest.mark.parametrize("limit", [30 * 86400, 1e12, math.inf, datetime.timedelta.max], ids=str)
def test_limits_longer_than_the_system_can_wait_are_none(limit: float | datetime.timedelta) -> None:
    # Every call raised OverflowError: 30 days are more milliseconds than poll() takes.
    assert deadlines.seconds(limit) is None
    assert deadlines.seconds(20 * 86400) == 20 * 86400


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_time_that_never_comes_does_not_end_the_thread() -> None:
    # batched_handler(timeout=float("inf")), for full batches only
    some = IoThread()
    is_done = threading.Event()
    some.at(math.inf, lambda: None)
    some.at(time.monotonic() + 0.01, is_done.set)
    assert is_done.wait(WITHIN_S)
    thread = some._thread
    is_done.clear()
    some.at(time.monotonic() + 0.01, is_done.set)
    assert is_done.wait(WITHIN_S)
    assert some._thread is thread
