"""The states of a program's nodes when they end, in any order of the news."""

import random
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.launch.coordination import node_lifecycle
from lp_pipe.launch.coordination.node_lifecycle import NodeLifecycles
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.supervision.lifecycle import NodeState
from lp_pipe.launch.supervision.messages import Failure

FAILURES = [
    None,
    Failure("ValueError", "asked to"),
    Failure("Unavailable", "the peer has gone", is_unavailable=True),
    Failure("Unavailable", "the peer has gone", is_unavailable=True, is_plain_echo=True),
    Failure("NodeHang", "no progress", is_hang=True),
]


class Clock:
    """A time.monotonic that only the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock.monotonic)
    return clock


def spec_of(name: str, part: str = "", **options: Any) -> NodeSpec:
    label, _, index = name.partition("/")
    return NodeSpec(name + part, label, int(index), 1, lp.PyNode(print), lp.Resources(), **options)


def states(lifecycles: NodeLifecycles) -> list[NodeState]:
    return [record.state for record in lifecycles.nodes.values()]


def test_a_node_starts_again_once_nothing_is_left_of_it_and_its_back_off_has_passed(clock: Clock) -> None:
    lifecycles = NodeLifecycles([spec_of("a/0", on_failure="restart", max_restarts=3)], lambda record: None)
    lifecycles.started("a/0", 4711)
    news = lifecycles.ended("a/0", FAILURES[1], can_restart=True)
    assert "restart 1 of 3 in 0.1 s" in news and states(lifecycles) == [NodeState.RESTARTING]
    assert lifecycles.next_order() is None
    lifecycles.gone("a/0")
    assert states(lifecycles) == [NodeState.DOWN]
    assert lifecycles.next_order() is None
    clock.now += 0.1
    assert lifecycles.next_order() == node_lifecycle.Order(True, ["a/0"])
    assert states(lifecycles) == [NodeState.STARTING]


def fail_after(clock: Clock, lifecycles: NodeLifecycles, uptime_s: float, *, serves: bool = False) -> float:
    """Let node a/0 fail once more and start it again; returns how long it was down."""
    lifecycles.started("a/0", 4711)
    assert not serves or [lifecycles.serves("a/0"), lifecycles.serves("a/0")] == [True, False]
    clock.now += uptime_s
    lifecycles.ended("a/0", FAILURES[1], can_restart=True)
    lifecycles.gone("a/0")
    wait_s = lifecycles.until_next_decision()
    assert wait_s is not None
    clock.now += wait_s + 1e-6
    assert lifecycles.next_order() == node_lifecycle.Order(True, ["a/0"])
    return round(wait_s, 3)


@pytest.mark.parametrize("policy", [{"on_failure": "restart", "max_restarts": 100}, {"retries": 100}])
def test_the_back_off_begins_anew_once_the_node_has_served(clock: Clock, policy: dict[str, Any]) -> None:
    lifecycles = NodeLifecycles([spec_of("a/0", **policy)], lambda record: None)
    assert [fail_after(clock, lifecycles, 0.01) for _ in range(4)] == [0.1, 0.2, 0.4, 0.8]
    assert [fail_after(clock, lifecycles, 1.0, serves=True) for _ in range(4)] == [0.1] * 4
    assert [fail_after(clock, lifecycles, 1.0) for _ in range(2)] == [0.2, 0.4]
    assert fail_after(clock, lifecycles, 5.1) == 0.1
    assert [fail_after(clock, lifecycles, 0.01) for _ in range(2)] == [0.2, 0.4]


@pytest.mark.parametrize("limit", [None, 10])
def test_a_node_that_cannot_be_loaded_twice_in_a_row_fails_unless_it_has_a_limit(
    limit: int | None, clock: Clock
) -> None:
    lifecycles = NodeLifecycles([spec_of("a/0", on_failure="restart", max_restarts=limit)], lambda record: None)
    raised, loading = FAILURES[1], Failure("ModuleNotFoundError", "No module named 'x'", is_loading=True)
    is_failed = []
    for failure in (raised, raised, loading, raised, loading, loading):
        lifecycles.started("a/0", 4711)
        lifecycles.ended("a/0", failure, can_restart=True)
        lifecycles.gone("a/0")
        clock.now += 10
        lifecycles.next_order()
        is_failed.append(lifecycles.first_failure.first is not None)
    assert is_failed == [False] * 5 + [limit is None]


def random_specs(choose: random.Random) -> list[NodeSpec]:
    specs = []
    for group in range(choose.randint(1, 3)):
        options = {
            "on_failure": choose.choice(["stop", "restart", "ignore"]),
            "on_hang": choose.choice(["report", "stop", "restart"]),
            "max_restarts": choose.randint(0, 3),
            "retries": choose.randint(0, 2),
        }
        parts = choose.choice([[""], [".0", ".1"], [".0", ".1", ".2"]])
        specs += [spec_of(f"g{group}/0", part, **options) for part in parts]
    return specs


@pytest.mark.parametrize("seed", range(100))
def test_news_in_any_order_lead_through_legal_states_to_the_end(clock: Clock, seed: int) -> None:
    choose = random.Random(seed)
    lifecycles = NodeLifecycles(random_specs(choose), lambda record: None)
    names = list(lifecycles.nodes)

    def end(node_id: str) -> None:
        failure = choose.choice(FAILURES)
        lifecycles.ended(node_id, failure, can_restart=failure is None or choose.random() < 0.9)

    def request_stop(node_id: str) -> None:
        lifecycles.stop_requested |= choose.random() < 0.1  # nothing takes a stop back

    news = [
        lambda node_id: lifecycles.started(node_id, 4711),
        end,
        end,
        lifecycles.gone,
        lifecycles.gone,
        lifecycles.ends_unasked,
        lambda node_id: lifecycles.end_inner_nodes(node_id.partition(".")[0]) if "." in node_id else None,
        request_stop,
    ]
    for _ in range(100):
        choose.choice(news)(choose.choice(names))  # an illegal state is an AssertionError
        clock.now += choose.choice([0.0, 0.01, 1.0])
        while lifecycles.must_go_on and (order := lifecycles.next_order()) is not None:
            if order.is_restart:
                assert {lifecycles.nodes[node_id].state for node_id in order.node_ids} == {NodeState.STARTING}
        assert not any(record.is_told_to_end and record.state.is_gone for record in lifecycles.nodes.values())
    lifecycles.stop_requested = True
    lifecycles.end_all()
    for node_id in names:
        lifecycles.gone(node_id)
    assert all(record.is_down and not record.is_told_to_end for record in lifecycles.nodes.values())
    assert not lifecycles.must_go_on


def test_a_node_that_waits_for_a_host_is_started_there_unless_the_work_of_its_group_is_done(clock: Clock) -> None:
    options: dict[str, Any] = {"on_failure": "ignore", "least_nodes": 1, "least_started": 1}
    lifecycles = NodeLifecycles([spec_of(f"a/{index}", **options) for index in range(3)], lambda record: None)
    lifecycles.wait_for_room(["a/2"])
    for node_id in ("a/0", "a/1"):
        lifecycles.started(node_id, 4711)
    lifecycles.ended("a/1", Failure("HostLost", "its host is lost"), can_restart=False)
    assert not lifecycles.may_start_late("a/1")  # something of it may be left
    lifecycles.gone("a/1")
    assert states(lifecycles) == [NodeState.RUNNING, NodeState.FAILED, NodeState.WAITING]
    assert lifecycles.next_order() is None and lifecycles.must_go_on
    lifecycles.start_late(["a/0", "a/1", "a/2"])
    assert {str(lifecycles.next_order()), str(lifecycles.next_order())} == {
        str(node_lifecycle.Order(True, [node_id])) for node_id in ("a/1", "a/2")
    }
    lifecycles.started("a/1", 4712)
    lifecycles.ended("a/1", Failure("HostLost", "its host is lost"), can_restart=False)
    lifecycles.gone("a/1")
    lifecycles.ended("a/0", None, can_restart=True)
    assert not lifecycles.may_start_late("a/1")


def test_nodes_that_wait_for_a_host_do_not_keep_a_program_from_its_end(clock: Clock) -> None:
    lifecycles = NodeLifecycles([spec_of(f"a/{index}", least_started=1) for index in range(2)], lambda record: None)
    lifecycles.wait_for_room(["a/1"])
    lifecycles.started("a/0", 4711)
    lifecycles.ended("a/0", None, can_restart=True)
    lifecycles.gone("a/0")
    assert not lifecycles.must_go_on
    lifecycles.end_all()
    assert states(lifecycles) == [NodeState.FINISHED, NodeState.STOPPED]
