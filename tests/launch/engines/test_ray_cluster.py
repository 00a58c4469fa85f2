"""The ray engine against a real Ray cluster: two nodes of it on this machine."""

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import lp_pipe as lp
from lp_pipe.connections.credentials import Credentials
from lp_pipe.launch.engines import Invitation, RayEngine, StartedAgent
from tests.launch.engines.programs import (
    REPOSITORY,
    WITHIN_S,
    agents,
    are_gone,
    asking,
    char_gpt,
    echo_script,
    grown,
    probes,
    seen_by_others,
    trained,
)
from tests.waiting import until

pytestmark = [
    pytest.mark.multihost,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray"),
    pytest.mark.timeout(240),
]
_SETTINGS = {
    "RAY_AUTH_MODE": "disabled",  # Ray may turn it on by itself for a head, and not for who joins it
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "PYTHONPATH": str(REPOSITORY),
}
_NODE = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="lp-ray-", dir="/tmp")  # short: sockets are in it
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**_SETTINGS, "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        try:
            made = Cluster(initialize_head=True, head_node_args={**_NODE, "include_dashboard": False})
            made.add_node(**_NODE)
            yield made
            made.shutdown()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def address(cluster: Any) -> Iterator[str]:
    """Yield the cluster's address. After the test, no agent is left, and no process is connected to the cluster."""
    import ray

    before = set(psutil.pids())
    yield cluster.address
    until(lambda: not [name for name, agent in agents().items() if name.startswith(HOST) and agent.pid not in before])
    assert not ray.is_initialized()


HOST = os.uname().nodename


def options(address: str, **more: str) -> dict[str, Any]:
    return {"engine": "ray", "engine_options": {"ray_address": address, **more}}


@pytest.mark.usefixtures("without_torch")
def test_an_unchanged_program_runs_on_the_nodes_of_a_cluster(address: str) -> None:
    with lp.launch(asking(2, "RAY_RAYLET_PID"), "multi_host", **options(address)) as run:
        run.wait(WITHIN_S)
    said = (run.run_dir / "logs" / "asking-0.log").read_text().split()
    assert said[:2] == ["they", "say"] and len(set(said[2:])) == 2  # two raylets


def test_a_pipeline_has_the_parameters_of_thread_mode(address: str) -> None:
    assert trained("multi_host", **options(address)) == trained("thread")


@pytest.mark.usefixtures("without_torch")
def test_nodes_get_the_gpus_that_ray_has_given_to_the_agents(address: str) -> None:
    """Ray counts what it is told that there is, and this test starts nothing on a GPU."""
    with lp.launch(probes(2, gpus=1), "multi_host", **options(address)) as run:
        clients = [run.client("probe", index) for index in range(2)]
        assert [client.ask(os.getenv, "CUDA_VISIBLE_DEVICES") for client in clients] == ["0", "0"]
        assert len({client.ask(os.getenv, "RAY_RAYLET_PID") for client in clients}) == 2
    with pytest.raises(ValueError, match="wants 1 GPUs for each of its 2 nodes"):
        lp.launch(probes(2, gpus=1), "multi_host", **options(address, gpus_per_host="0"))


def test_the_example_has_the_parameters_of_thread_mode(address: str, tmp_path: Path) -> None:
    inside = char_gpt(tmp_path, "multi_host", "--engine=ray", f"--ray-address={address}")
    assert inside == char_gpt(tmp_path, "thread")


@pytest.mark.usefixtures("without_torch")
def test_agents_that_are_packed_share_a_node_and_have_cores_of_their_own(address: str) -> None:
    packed = options(address, placement="pack", cpus_per_host="1", gpus_per_host="0")
    with lp.launch(probes(2), "multi_host", hosts="2", **packed) as run:
        clients = [run.client("probe", index) for index in range(2)]
        assert len({client.ask(os.getenv, "RAY_RAYLET_PID") for client in clients}) == 1
        first, second = (client.ask(os.sched_getaffinity, 0) for client in clients)
    if os.cpu_count() != 1:
        assert len(first) == len(second) == 1 and first != second


@pytest.mark.usefixtures("without_torch")
def test_an_agent_that_is_killed_is_named(address: str) -> None:
    run = lp.launch(probes(), "multi_host", **options(address))
    nodes = [run.client("probe", index).ask(os.getpid) for index in range(2)]
    agents()[f"{HOST}-2"].kill()
    with pytest.raises(lp.NodeError, match=rf"HostLost: host '{HOST}-2' is lost: .*killed by SIGKILL"):
        run.wait(WITHIN_S)
    until(lambda: are_gone(nodes))


@pytest.mark.usefixtures("without_torch")
def test_a_node_that_is_killed_is_named(address: str) -> None:
    run = lp.launch(probes(), "multi_host", **options(address))
    os.kill(run.client("probe", 1).ask(os.getpid), signal.SIGKILL)
    with pytest.raises(lp.NodeError, match="killed by SIGKILL") as caught:
        run.wait(WITHIN_S)
    assert f"probe/1 on {HOST}-2 failed" in caught.value.report


def test_nothing_is_left_when_the_launcher_is_killed(
    address: str, script: "Callable[[str], subprocess.Popen[str]]"
) -> None:
    launcher = script(echo_script(f"**{options(address)!r}"))
    assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
    found = [agents()[f"{HOST}-{number}"] for number in (1, 2)]
    family = [process.pid for agent in found for process in (agent, *agent.children(recursive=True))]
    assert len(family) >= 6  # agents, templates, nodes
    launcher.kill()
    until(lambda: are_gone(family), within_s=7)


@pytest.mark.usefixtures("without_torch")
def test_an_actor_that_is_killed_takes_its_agent_along(address: str) -> None:
    run = lp.launch(probes(), "multi_host", **options(address))
    nodes = [run.client("probe", index).ask(os.getpid) for index in range(2)]
    agents()[f"{HOST}-1"].parent().kill()
    with pytest.raises(lp.NodeError, match=rf"host '{HOST}-1' is lost: .*(ActorDied|ActorUnavailable)Error"):
        run.wait(WITHIN_S)
    until(lambda: are_gone(nodes))


class _Recording(RayEngine):
    token = ""

    def start(self, invitation: Invitation) -> "list[StartedAgent]":
        self.token = Credentials.from_bytes(invitation.secret).token
        return list(super().start(invitation))


@pytest.mark.usefixtures("without_torch")
def test_the_secret_is_in_no_command_line_and_no_environment(address: str) -> None:
    engine = _Recording(ray_address=address)
    with lp.launch(probes(), "multi_host", engine=engine) as run:
        run.client("probe", 1).ask(abs, -1)
        assert seen_by_others("RAY_RAYLET_PID") and engine.token and not seen_by_others(engine.token)


@pytest.mark.usefixtures("without_torch")
def test_more_than_the_cluster_has_is_an_error_that_says_what_it_has(address: str) -> None:
    wanting = options(address, cpus_per_host="3", gpus_per_host="0", ray_timeout="1")
    with pytest.raises(lp.LaunchError, match=r"no room for 2 hosts with 3 CPU each .* 4 of 4 CPU.* on 2 hosts"):
        lp.launch(probes(), "multi_host", **wanting)


@pytest.mark.usefixtures("without_torch")
def test_a_signal_handler_of_the_program_is_kept(address: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with lp.launch(probes(1), "multi_host", **options(address), hosts="1") as run:
        run.client("probe").ask(abs, -1)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("without_torch")
def test_an_elastic_run_starts_a_lost_agent_again_also_on_a_new_node_of_the_cluster(cluster: Any, address: str) -> None:
    with lp.launch_elastic(probes, "1:2", **options(address)) as run:
        agents()[f"{HOST}-2"].kill()
        until(lambda: run.num_hosts == 1)
        until(lambda: grown(run, 2))
        raylets = [int(run.run.client("probe", index).ask(os.getenv, "RAY_RAYLET_PID")) for index in range(2)]
        (node,) = cluster.worker_nodes
        assert node.all_processes["raylet"][0].process.pid in raylets
        cluster.remove_node(node, allow_graceful=False)
        until(lambda: run.num_hosts == 1)
        cluster.add_node(**_NODE)
        until(lambda: grown(run, 2))
        assert run.run.client("probe", 1).ask(abs, -1) == 1


@pytest.mark.usefixtures("without_torch")
def test_a_node_of_the_cluster_that_dies_is_a_lost_host(cluster: Any, address: str) -> None:
    """Kill a raylet and with it the actor. This test is the last one, since the cluster is smaller then."""
    run = lp.launch(probes(), "multi_host", **options(address))
    raylets = [int(run.client("probe", index).ask(os.getenv, "RAY_RAYLET_PID")) for index in range(2)]
    (node,) = cluster.worker_nodes
    second = raylets.index(node.all_processes["raylet"][0].process.pid)
    cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(lp.NodeError, match=rf"HostLost: host '{HOST}-{second + 1}' is lost"):
        run.wait(WITHIN_S)
