"""The slurm engine against a real Slurm: one slurmctld, and three slurmd on this machine."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lp_pipe as lp
from lp_pipe.connections.credentials import Credentials
from lp_pipe.launch.engines import HostOffer, Invitation, SlurmEngine, StartedAgent
from tests.launch.engines import slurm_cluster
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
    pytest.mark.skipif(bool(slurm_cluster.why_not()), reason=slurm_cluster.why_not() or "there is Slurm"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm_cluster.SlurmCluster]:
    made = slurm_cluster.SlurmCluster(3)
    yield made
    made.close()


@pytest.fixture
def outside(cluster: slurm_cluster.SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Submit from a host outside. After the test, no task is left on any host."""
    monkeypatch.setenv("SLURM_CONF", cluster.conf)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    yield
    until(lambda: not cluster.tasks())


@pytest.fixture
def inside(cluster: slurm_cluster.SlurmCluster, outside: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an allocation of all hosts."""
    allocation = cluster.allocation()
    for name, value in allocation.environment.items():
        monkeypatch.setenv(name, value)
    yield
    until(lambda: not cluster.tasks())  # by themselves: not because the allocation ends
    allocation.close()


@pytest.mark.usefixtures("inside", "without_torch")
def test_an_unchanged_program_runs_on_all_hosts_of_the_allocation() -> None:
    with lp.launch(asking(3, "SLURMD_NODENAME"), "multi_host", engine="slurm") as run:
        run.wait(WITHIN_S)
    assert "they say node1 node2 node3" in (run.run_dir / "logs" / "asking-0.log").read_text()


@pytest.mark.usefixtures("inside")
def test_a_pipeline_on_some_of_the_hosts_has_the_parameters_of_thread_mode() -> None:
    assert trained("multi_host", engine="slurm", hosts="node2,node3") == trained("thread")


@pytest.mark.usefixtures("inside", "without_torch")
def test_features_of_slurm_are_labels_of_the_hosts() -> None:
    program = probes(2, host_labels=["all", "of_node2"])
    with lp.launch(program, "multi_host", engine="slurm", hosts="node1,node2") as run:
        assert {run.client("probe", index).ask(os.getenv, "SLURMD_NODENAME") for index in range(2)} == {"node2"}


@pytest.mark.usefixtures("inside", "without_torch")
def test_nodes_get_the_gpus_that_slurm_has_given_to_the_job() -> None:
    with lp.launch(probes(4, gpus=1), "multi_host", engine="slurm", hosts="2") as run:
        clients = [run.client("probe", index) for index in range(4)]
        found = [
            (client.ask(os.getenv, "SLURMD_NODENAME"), client.ask(os.getenv, "CUDA_VISIBLE_DEVICES"))
            for client in clients
        ]
    assert found == [("node1", "0"), ("node1", "1"), ("node2", "0"), ("node2", "1")]


@pytest.mark.usefixtures("inside")
def test_the_example_has_the_parameters_of_thread_mode(tmp_path: Path) -> None:
    inside = char_gpt(tmp_path, "multi_host", "--engine=slurm")
    assert inside == char_gpt(tmp_path, "thread")


@pytest.mark.usefixtures("inside", "without_torch")
def test_an_agent_that_is_killed_is_named_and_takes_neither_the_other_agents_along_nor_leaves_its_nodes() -> None:
    run = lp.launch(probes(3), "multi_host", engine="slurm")
    nodes = [run.client("probe", index).ask(os.getpid) for index in range(3)]
    agents()["node2"].kill()
    with pytest.raises(lp.NodeError, match=r"HostLost: host 'node2' is lost: .*srun: Killed") as caught:
        run.wait(WITHIN_S)
    assert "node1" not in str(caught.value) and "node3" not in str(caught.value)
    until(lambda: are_gone(nodes))


@pytest.mark.usefixtures("inside", "without_torch")
def test_an_elastic_run_goes_on_without_a_lost_host_and_starts_its_agent_again() -> None:
    with lp.launch_elastic(probes, "2:3", engine="slurm") as run:
        agents()["node2"].kill()
        until(lambda: run.num_hosts == 2)
        names = [run.run.client("probe", index).ask(os.getenv, "SLURMD_NODENAME") for index in range(2)]
        assert names == ["node1", "node3"]
        until(lambda: "node2" in agents())
        until(lambda: grown(run, 3))
        names = [run.run.client("probe", index).ask(os.getenv, "SLURMD_NODENAME") for index in range(3)]
        assert names == ["node1", "node2", "node3"]


@pytest.mark.usefixtures("inside", "without_torch")
def test_a_node_that_is_killed_is_named() -> None:
    run = lp.launch(probes(3), "multi_host", engine="slurm")
    os.kill(run.client("probe", 2).ask(os.getpid), signal.SIGKILL)
    with pytest.raises(lp.NodeError, match="killed by SIGKILL") as caught:
        run.wait(WITHIN_S)
    assert "probe/2 on node3 failed" in caught.value.report


@pytest.mark.usefixtures("inside")
def test_nothing_is_left_on_any_host_when_the_launcher_is_killed(
    cluster: slurm_cluster.SlurmCluster, script: "Callable[[str], subprocess.Popen[str]]"
) -> None:
    launcher = script(echo_script("engine='slurm', hosts='2'"))
    assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
    assert cluster.tasks()
    launcher.kill()
    until(lambda: not cluster.tasks(), within_s=7)
    until(lambda: len(cluster.command("squeue", "--noheader", "--steps").splitlines()) <= 1)  # the allocation's own


@pytest.mark.usefixtures("inside", "without_torch")
def test_an_agent_that_does_not_start_is_an_error_at_once_with_what_it_said() -> None:
    with pytest.raises(lp.LaunchError, match=r"(?s)node1: its agent ended \(srun: .*127\).*no/such/python"):
        lp.launch(probes(), "multi_host", engine=SlurmEngine(python="/no/such/python"), join_timeout=20)


@pytest.mark.usefixtures("inside", "without_torch")
def test_more_or_other_hosts_than_the_allocation_has_are_refused() -> None:
    with pytest.raises(lp.LaunchError, match="hosts='4': the allocation has 3 hosts: node1 node2 node3"):
        SlurmEngine("4").hosts()
    with pytest.raises(lp.LaunchError, match="the allocation lacks node9"):
        SlurmEngine("node[2,9]").hosts()
    assert SlurmEngine("2").hosts() == [
        HostOffer(name, cpus=4, gpus=2, labels=frozenset({"all", f"of_{name}"})) for name in ("node1", "node2")
    ]


class _Recording(SlurmEngine):
    token = ""

    def start(self, invitation: Invitation) -> "list[StartedAgent]":
        self.token = Credentials.from_bytes(invitation.secret).token
        return list(super().start(invitation))


@pytest.mark.usefixtures("inside", "without_torch")
def test_the_secret_is_in_no_command_line_and_no_environment() -> None:
    engine = _Recording()
    with lp.launch(probes(3), "multi_host", engine=engine) as run:
        run.client("probe", 2).ask(abs, -1)
        assert {"node1", "node2", "node3"} <= agents().keys() and engine.token
        assert seen_by_others("SLURM_PROCID") and not seen_by_others(engine.token)


PROGRAM = """
import os, sys
import lp_pipe as lp

class Where:
    def host(self):
        return os.environ["SLURMD_NODENAME"]

def ask(handles, forever):
    print("hosts", [handle.host() for handle in handles], flush=True)
    if forever:
        lp.stop_event().wait()
        print("stopped in order", flush=True)
    else:
        lp.stop()

def make_program():
    program = lp.Program("where")
    with program.group("where"):
        handles = [program.add_node(lp.CourierNode(Where)) for _ in range(2)]
    program.add_node(lp.PyNode(ask, handles, "--forever" in sys.argv), label="asking")
    return program
"""


def submitted(folder: Path, *flags: str, hosts: int = 2) -> "subprocess.Popen[str]":
    (folder / "where.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "lp_pipe", "launch", "where.py", "--mode=multi_host", "--engine=slurm"]
    return subprocess.Popen(
        [*command, f"--hosts={hosts}", *flags],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.usefixtures("outside")
def test_outside_an_allocation_the_command_submits_itself_and_ends_as_the_job_ends(tmp_path: Path) -> None:
    out, err = submitted(tmp_path, "--partition=debug", "--time=5").communicate(timeout=60)
    assert "hosts ['node1', 'node2']" in out, out + err
    assert re.search(r"job \d+: submitted.*\njob \d+: (.*\njob \d+: )*COMPLETED", err)


@pytest.mark.usefixtures("outside")
def test_ctrl_c_stops_the_submitted_program_in_order(tmp_path: Path) -> None:
    following = submitted(tmp_path, "--", "--forever")
    assert following.stdout is not None
    seen = ""
    while "hosts [" not in seen:
        line = following.stdout.readline()
        assert line, seen
        seen += line
    following.send_signal(signal.SIGINT)
    out, err = following.communicate(timeout=60)
    assert following.returncode == 130, seen + out + err
    assert "stopped in order" in out and "interrupted; 3 nodes stopped" in out


@pytest.mark.usefixtures("outside")
def test_a_job_that_still_waits_is_cancelled_by_ctrl_c(cluster: slurm_cluster.SlurmCluster, tmp_path: Path) -> None:
    following = submitted(tmp_path, "--sbatch=--begin=now+1hour")
    assert following.stderr is not None
    assert "submitted" in following.stderr.readline() and "PENDING" in following.stderr.readline()
    following.send_signal(signal.SIGINT)
    _, err = following.communicate(timeout=60)
    assert "CANCELLED" in err and following.returncode != 0
    assert not cluster.command("squeue", "--noheader")


@pytest.mark.usefixtures("outside")
def test_what_sbatch_refuses_is_said(tmp_path: Path) -> None:
    following = submitted(tmp_path, "--partition=nowhere")
    _, err = following.communicate(timeout=60)
    assert following.returncode == 3 and "cannot submit where.py: sbatch failed" in err and "nowhere" in err
