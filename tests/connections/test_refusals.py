"""Who was turned away."""

import errno

import pytest

from lp_pipe.connections.refusals import Refusals


def test_all_are_counted_and_the_log_does_not_grow_with_them(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals("tls:host:1")
    for _ in range(1000):
        refusals.note("10.0.0.1:5", "it showed no token")
    assert refusals.count == 1000
    assert len(caplog.records) == 10
    last = "tls:host:1 has refused 10.0.0.1:5: it showed no token (512 times so far, of 512 in all)"
    assert caplog.records[-1].getMessage() == last


def test_those_who_only_knock_do_not_hide_one_who_knows_more(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals("tls:host:1")
    for number in range(1000):
        refusals.note("10.0.0.1:5", f"it knocked {number} times")
    logged = len(caplog.records)
    assert logged < 120
    refusals = Refusals("tls:host:1")
    for _ in range(1000):
        refusals.note("10.0.0.1:5", "it knocked")
    refusals.note("10.0.0.1:6", "it showed a wrong token")
    assert "it showed a wrong token (1 times so far, of 1001 in all)" in caplog.records[-1].getMessage()


def test_a_listener_that_is_out_of_descriptors_says_so_once_until_somebody_came_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Callers waited, and nothing told why.
    refusals = Refusals("unix:/run/server")
    for _ in range(2):
        for _ in range(10):
            refusals.keep_waiting(OSError(errno.EMFILE, "Too many open files"))
        refusals.go_on()
    said = "unix:/run/server keeps all callers waiting: this process: [Errno 24] Too many open files; raise its limit"
    assert [record.getMessage() for record in caplog.records] == [f"{said} (ulimit -n)"] * 2
