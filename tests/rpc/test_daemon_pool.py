"""Threads for what may never return."""

import threading

import pytest

import lp_pipe as lp
from lp_pipe.rpc.daemon_pool import DaemonPool

WITHIN_S = 10.0


def test_what_was_asked_for_before_the_end_is_done_and_what_comes_after_it_fails_at_once(no_leaks: None) -> None:
    pool = DaemonPool(1, "sums")
    go_on = threading.Event()
    first = pool.start(lambda: go_on.wait(WITHIN_S))
    second = pool.start(lambda: 1 + 1)
    pool.close()
    late = pool.start(lambda: 2 + 2)
    with pytest.raises(lp.Unavailable, match="sums"):
        late.result(WITHIN_S)
    go_on.set()
    assert first.result(WITHIN_S)
    assert second.result(WITHIN_S) == 2


def test_a_thread_that_the_system_could_not_start_is_started_for_the_next_task(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    # It counted as started, so that what came later waited for ever.
    pool = DaemonPool(1, "sums")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _no_more_threads)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pool.start(lambda: 1)
    assert pool.start(lambda: 2).result(WITHIN_S) == 2
    pool.close()


def test_threads_that_there_are_do_the_work_when_the_system_has_no_more(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    pool = DaemonPool(2, "sums")
    go_on = threading.Event()
    first = pool.start(lambda: go_on.wait(WITHIN_S))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _no_more_threads)
        second = pool.start(lambda: 2)
    go_on.set()
    assert first.result(WITHIN_S)
    assert second.result(WITHIN_S) == 2
    pool.close()


def _no_more_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_pool_that_was_never_used_can_be_closed(no_leaks: None) -> None:
    pool = DaemonPool(2, "sums")
    pool.close()
    assert isinstance(pool.start(lambda: 1).exception(WITHIN_S), lp.Unavailable)
