"""A host is lost, and its nodes start again on another one: here every host is an agent of this machine."""

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import lp_pipe as lp
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.launch.engines import LocalEngine
from lp_pipe.launch.host import Host
from lp_pipe.launch.hosts import relocation
from lp_pipe.launch.plan.hardware import Hardware
from lp_pipe.launch.plan.host_placement import HostPlacement
from lp_pipe.launch.plan.placement import Placement
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.supervision.messages import Failure
from tests.launch.engines.programs import Probe, agent_of, are_gone
from tests.waiting import until

WITHIN_S = 20.0

pytestmark = pytest.mark.usefixtures("no_leaks")


def program(**options: Any) -> lp.Program:
    made = lp.Program("lost hosts")
    with made.group("probe", on_failure="restart", **options):
        for _ in range(2):
            made.add_node(lp.CourierNode(Probe))
    return made


def launched(made: lp.Program, hosts: str) -> lp.Run:
    return lp.launch(made, "multi_host", engine=LocalEngine(hosts), grace=2.0)


def host_of(run: lp.Run, node_id: str) -> str:
    host: Host = run._host
    return host.where(node_id)


def test_the_nodes_of_a_killed_host_start_again_on_the_spare_one_and_healthy_ones_stay() -> None:
    with launched(program(), "3") as run:
        clients = [run.client("probe", index) for index in range(2)]
        before = [client.ask(os.getpid) for client in clients]
        assert [host_of(run, f"probe/{index}") for index in range(2)] == ["local0", "local1"]
        killed = time.monotonic()
        agent_of("local1").kill()
        until(lambda: run.status()["probe"][1]["restarts"] == 1 and run.status()["probe"][1]["state"] == "running")
        assert time.monotonic() - killed < 8
        assert are_gone(before[1:])  # before its successor started
        assert host_of(run, "probe/1") == "local2"
        after = [client.ask(os.getpid) for client in clients]
        assert after[0] == before[0] and after[1] != before[1]
        assert agent_of("local2").pid == psutil.Process(after[1]).parent().ppid()
        assert "HostLost: host 'local1' is lost" in run.status()["probe"][1]["error"]


class Total:
    def __init__(self) -> None:
        self._total = 0

    def add(self, number: int) -> int:
        self._total += number
        return self._total

    def state_dict(self) -> int:
        return self._total

    def load_state_dict(self, state: int) -> None:
        self._total = state


@pytest.mark.slow
def test_a_part_of_checkpoints_that_starts_on_another_host_has_lost_its_state(tmp_path: Path) -> None:
    made = lp.Program("lost hosts")
    with made.group("total", on_failure="restart"):
        handle = made.add_node(lp.CourierNode(Total))
    with launched(made, "2") as run:
        total = run.client(handle)
        checkpoints = Checkpoints({"total": total}, tmp_path)
        total.add(3)
        checkpoints.save(1)
        total.add(4)
        agent_of(host_of(run, "total/0")).kill()
        until(lambda: run.status()["total"][0]["restarts"] == 1)
        with pytest.raises(lp.StateLost):
            total.add(1)
        checkpoints.restore()
        assert total.add(1) == 4


@pytest.mark.slow
def test_without_a_spare_they_go_where_there_is_room() -> None:
    with launched(program(resources=lp.Resources(memory=1 << 30)), "a:memory_gib=2,b:memory_gib=1") as run:
        run.client("probe", 1).ask(os.getpid)
        agent_of("b").kill()
        until(lambda: run.status()["probe"][1]["restarts"] == 1)
        assert run.client("probe", 1).ask(os.getpid) and host_of(run, "probe/1") == "a"


@pytest.mark.slow
def test_where_no_host_has_room_the_failure_says_what_is_missing() -> None:
    run = launched(program(resources=lp.Resources(memory=1 << 30)), "a:memory_gib=1,b:memory_gib=1")
    run.client("probe", 1).ask(os.getpid)
    killed = time.monotonic()
    agent_of("b").kill()
    with pytest.raises(
        lp.NodeError,
        match=r"HostLost: host 'b' is lost: .*; its nodes cannot start on another host: "
        r"group 'probe' wants 1.0 GiB of memory .* left: a: 0 of 0 GPUs, 0.0 GiB",
    ):
        run.wait(WITHIN_S)
    assert time.monotonic() - killed < 5


@pytest.mark.slow
def test_a_stop_does_not_wait_for_what_may_be_left_on_a_lost_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relocation, "fence_s", lambda is_silent: 100.0)
    run = launched(program(), "2")
    run.client("probe", 1).ask(os.getpid)
    agent_of("local1").kill()
    until(lambda: run.status()["probe"][1]["state"] == "restarting")
    began = time.monotonic()
    run.stop()
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_hosts_that_are_lost_together_leave_their_nodes_to_the_last_one() -> None:
    with launched(program(), "4") as run:
        run.client("probe", 1).ask(os.getpid)
        for agent in [agent_of(host) for host in ("local1", "local2", "local3")]:  # it was to go to one of these
            agent.kill()
        until(lambda: run.status()["probe"][1]["state"] == "running" and run.status()["probe"][1]["restarts"])
        assert host_of(run, "probe/1") == "local0"
        assert run.client("probe", 1).ask(os.getpid) != run.client("probe", 0).ask(os.getpid)


class _Coordinator:
    """A coordinator that records what a Relocation asks and hears."""

    def __init__(self, *node_ids: str) -> None:
        self.down: list[str] = []
        self._states = dict.fromkeys(node_ids, "running")

    def states(self) -> dict[str, str]:
        return self._states

    def is_gone(self, node_id: str) -> bool:
        return node_id in self.down

    def must_end(self, node_id: str) -> bool:
        return False

    def node_ended(self, node_id: str, failure: Failure, can_restart: bool = True) -> None:
        self._states[node_id] = "restarting" if can_restart else "failed"

    def node_down(self, node_id: str) -> None:
        self.down.append(node_id)


def test_a_node_may_start_only_when_its_last_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that was to go from a, behind a cut link, to b, which then died, may still run on a."""
    waits = {True: 0.6, False: 0.1}
    monkeypatch.setattr(relocation, "fence_s", lambda is_silent: waits[is_silent])
    spec = NodeSpec("n/0", "n", 0, 1, lp.PyNode(print), lp.Resources(), on_failure="restart")
    hosts = {name: Hardware(frozenset({name}), (0,), 1 << 30, ()) for name in "abc"}
    coordinator: Any = _Coordinator("n/0")
    lost = relocation.Relocation([spec], hosts, {"n/0": HostPlacement("a", Placement())}, coordinator)
    began = time.monotonic()
    lost.lose("a", "it was cut off", is_silent=True)
    assert lost.host_of("n/0") == "b" and lost.is_fenced("n/0")
    lost.lose("b", "it was killed", is_silent=False)
    assert lost.host_of("n/0") == "c"
    until(lambda: coordinator.down)
    assert time.monotonic() - began >= 0.6 and not lost.is_fenced("n/0")
    lost.close()
