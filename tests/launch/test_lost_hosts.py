"""A host is lost, and its nodes start again on another one: here every host is an agent of this machine."""

import os
import time
from typing import Any

import psutil
import pytest

import lp_pipe as lp
from lp_pipe.launch import relocation
from lp_pipe.launch.engines import LocalEngine
from lp_pipe.launch.host import Host
from tests.launch.engines.programs import Probe, are_gone, until

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


def agent_of(host: str) -> psutil.Process:
    (found,) = [child for child in psutil.Process().children() if f"--name {host} " in " ".join(child.cmdline())]
    return found


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


@pytest.mark.slow
def test_without_a_spare_they_go_where_there_is_room() -> None:
    with launched(program(resources=lp.Resources(memory=1 << 30)), "a:memory_gib=2,b:memory_gib=1") as run:
        run.client("probe", 1).ask(os.getpid)
        agent_of("b").kill()
        until(lambda: run.status()["probe"][1]["restarts"] == 1)
        assert run.client("probe", 1).ask(os.getpid) and host_of(run, "probe/1") == "a"


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
