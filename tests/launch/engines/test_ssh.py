"""The ssh engine against real sshd processes, each in namespaces of its own: nothing is shared but the file system."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.launch.engines import SshEngine
from tests.launch.engines import namespaces
from tests.launch.engines.programs import WITHIN_S, echo_script, trained
from tests.waiting import until

pytestmark = [
    pytest.mark.multihost,
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "there are hosts"),
]


@pytest.fixture(scope="module")
def all_hosts() -> Iterator[namespaces.Hosts]:
    made = namespaces.Hosts(2)
    yield made
    made.close()


@pytest.fixture
def hosts(all_hosts: namespaces.Hosts) -> Iterator[namespaces.Hosts]:
    """Yield the hosts. After the test, no process of it is left on any of them."""
    yield all_hosts
    until(lambda: not any(all_hosts.pids(name) for name in all_hosts.names), within_s=15)


@pytest.fixture
def doomed_hosts() -> Iterator[namespaces.Hosts]:
    """Yield hosts for a test that breaks one."""
    made = namespaces.Hosts(2)
    yield made
    made.close()


def engine(hosts: namespaces.Hosts) -> SshEngine:
    return SshEngine(",".join(hosts.names), ssh_config=hosts.ssh_config, python=hosts.python)


class Probe:
    def host(self) -> str:
        return socket.gethostname()

    def ask(self, function: Any, *args: Any) -> Any:
        return function(*args)


def probes() -> lp.Program:
    program = lp.Program("probes")
    with program.group("probe"):
        for _ in range(2):
            program.add_node(lp.CourierNode(Probe))
    return program


def test_an_unchanged_program_runs_across_hosts_that_have_no_copy_of_it(hosts: namespaces.Hosts) -> None:
    class Asking:
        def __init__(self, probes: list[Any]) -> None:
            self._probes = probes

        def ask_all(self) -> list[str]:
            hosts = [probe.host() for probe in self._probes]
            print("hosts", hosts)
            return hosts

    program = probes()
    handles = [node.create_handle() for node in program.groups["probe"]]
    program.add_node(lp.CourierNode(Asking, handles), label="asking")
    with lp.launch(program, "multi_host", engine=engine(hosts)) as run:
        assert [run.client("probe", index).host() for index in range(2)] == ["h1", "h2"]
        assert run.client("asking").ask_all() == ["h1", "h2"]
    assert "hosts ['h1', 'h2']" in (run.run_dir / "logs" / "asking-0.log").read_text()


def test_a_pipeline_across_hosts_has_the_parameters_of_thread_mode(hosts: namespaces.Hosts) -> None:
    assert trained("multi_host", engine=engine(hosts)) == trained("thread")


def test_a_host_whose_link_is_cut_is_known_to_be_lost_within_ten_seconds(doomed_hosts: namespaces.Hosts) -> None:
    run = lp.launch(probes(), "multi_host", engine=engine(doomed_hosts))
    run.client("probe", 1).host()
    doomed_hosts.cut("h2")
    cut = time.monotonic()
    until(lambda: run.failure is not None)
    assert time.monotonic() - cut < 10
    with pytest.raises(lp.NodeError, match="HostLost: host 'h2' is lost: nothing was heard of it for 7 s"):
        run.wait(WITHIN_S)
    # The cut host takes its launcher for dead, and takes its own nodes down.
    until(lambda: not any(doomed_hosts.pids(name) for name in doomed_hosts.names), within_s=cut + 23 - time.monotonic())


def test_nothing_is_left_on_any_host_when_the_launcher_is_killed(
    hosts: namespaces.Hosts, script: "Callable[[str], subprocess.Popen[str]]"
) -> None:
    engine = f"SshEngine('h1,h2', ssh_config={hosts.ssh_config!r}, python={hosts.python!r})"
    launcher = script(echo_script(f"engine={engine}"))
    assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
    assert all(hosts.pids(name) for name in hosts.names)
    launcher.kill()
    until(lambda: not any(hosts.pids(name) for name in hosts.names), within_s=7)


def test_an_agent_that_is_killed_takes_its_nodes_along(hosts: namespaces.Hosts) -> None:
    run = lp.launch(probes(), "multi_host", engine=engine(hosts))
    run.client("probe", 1).host()
    (agent,) = [pid for pid in hosts.pids("h2") if "agent" in _command(pid)]
    killed = time.monotonic()
    os.kill(agent, 9)
    until(lambda: run.failure is not None)
    assert time.monotonic() - killed < 1.5
    with pytest.raises(lp.NodeError, match="host 'h2' is lost"):
        run.wait(WITHIN_S)


def test_what_ssh_says_of_a_host_that_cannot_be_reached_is_in_the_error(hosts: namespaces.Hosts) -> None:
    wrong = SshEngine("h1,nowhere.invalid", ssh_config=hosts.ssh_config, python=hosts.python)
    with pytest.raises(lp.LaunchError, match=r"nowhere.invalid: its agent ended \(exit status 255\)(.|\n)*resolve"):
        lp.launch(probes(), "multi_host", engine=wrong)


def test_an_interpreter_that_is_not_there_is_named(hosts: namespaces.Hosts) -> None:
    wrong = SshEngine("h1", ssh_config=hosts.ssh_config, python="/no/python")
    with pytest.raises(lp.LaunchError, match=r"exit status 12[67](.|\n)*/no/python"):
        lp.launch(probes(), "multi_host", engine=wrong)


def _command(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read().replace("\0", " ")
