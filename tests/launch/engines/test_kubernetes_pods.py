"""The pods of the Kubernetes engine, really run: with their user, capabilities, process namespace and secret."""

import getpass
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lp_pipe as lp
from lp_pipe.launch.engines import KubernetesEngine
from tests.launch.engines import podman
from tests.launch.engines.kubernetes_cluster import PretendCluster

pytestmark = [
    pytest.mark.multihost,
    pytest.mark.skipif(bool(podman.why_not()), reason=podman.why_not() or "there is podman"),
]


class Node:
    def capabilities(self) -> int:
        with open("/proc/self/status") as file:
            (line,) = [line for line in file if line.startswith("CapEff")]
        return int(line.split()[1], 16)

    def whoami(self) -> tuple[int, int, list[int]]:
        return os.getuid(), os.getgid(), os.getgroups()

    def name(self) -> str:
        return getpass.getuser()

    def write_files(self) -> list[str]:
        """Write where this user can: at home, among temporary files, in the run's folder and in shared memory."""
        folders = [Path.home(), Path(tempfile.gettempdir()), Path(lp.context().run_dir), Path("/dev/shm")]
        for folder in folders:
            (folder / f"file-of-{os.getpid()}").write_text("hello")
        return [str(folder) for folder in folders]

    def process_1(self) -> str:
        return Path("/proc/1/cmdline").read_bytes().decode()


def program() -> lp.Program:
    found = lp.Program("in pods")
    with found.group("node"):
        for _ in range(2):
            found.add_node(lp.CourierNode(Node))
    return found


@pytest.fixture
def pods() -> Iterator[podman.Podman]:
    made = podman.Podman()
    yield made
    made.close()


@pytest.fixture
def cluster(pods: podman.Podman, tmp_path: Path) -> Iterator[PretendCluster]:
    made = PretendCluster(tmp_path)
    made.run_pods(2, pods.start)
    yield made
    made.close()


def launch(cluster: PretendCluster, **options: str) -> lp.Run:
    engine = KubernetesEngine("2", image=podman.IMAGE, kubeconfig=cluster.kubeconfig, **options)
    return lp.launch(program(), "multi_host", engine=engine)


def test_a_program_runs_in_pods_of_a_user_that_nobody_knows(cluster: PretendCluster, pods: podman.Podman) -> None:
    with launch(cluster) as run:
        for index in range(2):
            node, pod = run.client("node", index), cluster.pod(index)
            assert (node.whoami(), node.capabilities()) == ((65532, 65532, [65532]), 0)
            assert (node.name(), node.write_files()[0]) == ("lp_pipe", "/home/lp_pipe")
            pods.execute(pod, pod["spec"]["containers"][0]["livenessProbe"]["exec"]["command"])
            assert pods.execute(pod, ["/bin/stat", "-c", "%a %u %g", "/run/lp_pipe/secret"]) == "440 0 65532\n"
    assert not cluster.objects


def test_root_in_a_pod_is_without_any_privilege(cluster: PretendCluster, pods: podman.Podman) -> None:
    with launch(cluster, run_as_user="0") as run:
        for index in range(2):
            assert run.client("node", index).whoami()[:2] == (0, 0)
            assert run.client("node", index).capabilities() == 0
            assert "lp_pipe" not in run.client("node", index).process_1()
            pod = cluster.pod(index)
            pods.execute(pod, pod["spec"]["containers"][0]["livenessProbe"]["exec"]["command"])
            assert pods.execute(pod, ["/bin/stat", "-c", "%a", "/run/lp_pipe/secret"]) == "400\n"
    for index in range(2):
        assert "the run has ended" in (run.run_dir / "agents" / f"host-{index}.log").read_text()
    assert not cluster.objects


def test_sigterm_ends_an_agent_at_once(cluster: PretendCluster, pods: podman.Podman) -> None:
    run = launch(cluster)
    run.client("node", 1).capabilities()
    killed = time.monotonic()
    pods.execute(cluster.pod(1), ["python", "-c", _TERMINATE, str(int(signal.SIGTERM))])
    with pytest.raises(lp.NodeError, match=r"host 'host-1' is lost: .*its agent ended: killed by SIGTERM"):
        run.wait(20)
    assert time.monotonic() - killed < 20
    run.stop()


_TERMINATE = """
import os, sys
for pid in filter(str.isdigit, os.listdir("/proc")):
    words = open(f"/proc/{pid}/cmdline").read().split("\\0")
    if "agent" in words:
        os.kill(int(pid), int(sys.argv[1]))
"""
