"""Threads for what may never return."""

import threading

import pytest

import lp_pipe as lp
from lp_pipe.rpc.pool import DaemonPool

WITHIN_S = 10.0


def test_what_was_asked_for_before_the_end_is_done_and_what_comes_after_it_fails_at_once(no_leaks: None) -> None:
    pool = DaemonPool(1, "sums")
    go_on = threading.Event()
    first = pool.start(lambda: go_on.wait(WITHIN_S))
    second = pool.start(lambda: 1 + 1)
    pool.close()
    late = pool.start(lambda: 2 + 2)
    with pytest.raises(lp.Unavailable, match="too late for one of the sums"):
        late.result(WITHIN_S)
    go_on.set()
    assert first.result(WITHIN_S)
    assert second.result(WITHIN_S) == 2


def test_a_pool_that_was_never_used_can_be_closed(no_leaks: None) -> None:
    pool = DaemonPool(2, "sums")
    pool.close()
    assert isinstance(pool.start(lambda: 1).exception(WITHIN_S), lp.Unavailable)
