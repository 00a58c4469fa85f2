"""The log of refused connections: it names their senders, and does not grow with their number."""

import errno
from types import SimpleNamespace

import pytest

from lp_pipe.connections import refusals as refusals_module
from lp_pipe.connections.refusals import Refusals


def test_all_are_counted_and_the_log_does_not_grow_with_them(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals("tls:host:1")
    for _ in range(1000):
        refusals.note("10.0.0.1:5", "it showed no token")
    assert refusals.count == 1000
    refusals.note("10.0.0.2:5", "it showed no token")
    refusals.summarize()
    refusals.summarize()
    assert [record.getMessage() for record in caplog.records] == [
        "tls:host:1 has refused 10.0.0.1:5: it showed no token",
        "tls:host:1 has refused 10.0.0.2:5: it showed no token",
        "tls:host:1 has refused 999 more (1001 in all): 999 x 10.0.0.1: it showed no token",
    ]


def test_a_long_attack_is_one_line_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(refusals_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    refusals = Refusals("tls:host:1")
    for port in range(3600):
        now[0] += 0.5
        refusals.note(f"10.0.0.1:{port}", "it showed no token")
    assert 29 <= len(caplog.records) <= 31
    assert "has refused 121 more (122 in all)" in caplog.records[1].getMessage()


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
    assert caplog.records[-1].getMessage() == "tls:host:1 has refused 10.0.0.1:6: it showed a wrong token"


def test_a_listener_that_is_out_of_descriptors_says_so_once_until_somebody_came_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Callers waited, and nothing told why.
    refusals = Refusals("unix:/run/server")
    for _ in range(2):
        for _ in range(10):
            refusals.keep_waiting(OSError(errno.EMFILE, "Too many open files"))
        refusals.go_on()
    said = "unix:/run/server keeps all callers waiting: [Errno 24] Too many open files"
    advice = "raise the limit of that process (ulimit -n)"
    assert [record.getMessage() for record in caplog.records] == [f"{said}; {advice}"] * 2
