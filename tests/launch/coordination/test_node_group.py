"""A node of a program as its users see it."""

import time

import pytest

import lp_pipe as lp
from lp_pipe.launch.coordination.node_lifecycle import NodeLifecycles
from lp_pipe.launch.plan.spec import NodeSpec


def test_a_node_is_up_for_as_long_as_it_is_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that was set while a program ran made its nodes younger than they were, or older.
    spec = NodeSpec("trainer/0", "trainer", 0, 1, lp.PyNode(print), lp.Resources())
    lifecycles = NodeLifecycles([spec], lambda record: None)
    lifecycles.started("trainer/0", 4711)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    assert lifecycles.groups["trainer/0"].row()["uptime_s"] >= 0
