"""Who was turned away."""

import pytest

from lp_pipe.connections.refusals import Refusals


def test_all_are_counted_and_the_log_does_not_grow_with_them(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals("grpcs:host:1")
    for _ in range(1000):
        refusals.note("ipv4:10.0.0.1:5", "it showed no token")
    assert refusals.count == 1000
    assert len(caplog.records) == 10
    last = "grpcs:host:1 has refused ipv4:10.0.0.1:5: it showed no token (refused so far: 512)"
    assert caplog.records[-1].getMessage() == last
