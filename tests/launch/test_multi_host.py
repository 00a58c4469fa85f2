"""Several hosts: one agent on each. Here all are agents of this host, with real mTLS connections between them."""

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import lp_pipe as lp
from lp_pipe.launch.engines import HostOffer, Invitation, LocalEngine, StartedAgent
from tests.launch.engines.programs import agent_of, echo_script
from tests.waiting import until

WITHIN_S = 20.0
AT_ONCE_S = 3.0  # on a busy machine, too; a host that is only silent counts as lost after 7 s

pytestmark = pytest.mark.usefixtures("no_leaks")


class Probe:
    """Runs small functions inside its node."""

    def ask(self, function: Any, *args: Any) -> Any:
        return function(*args)


def probes(count: int = 2, **options: Any) -> lp.Program:
    program = lp.Program("probes")
    with program.group("probe", **options):
        for _ in range(count):
            program.add_node(lp.CourierNode(Probe))
    return program


def launched(program: lp.Program, hosts: str = "2", **options: Any) -> lp.Run:
    return lp.launch(program, "multi_host", hosts=hosts, grace=2.0, **options)


def agent_above(pid: int) -> int:
    """The agent of a node: its template's parent."""
    return psutil.Process(pid).parent().ppid()


def test_an_unchanged_program_makes_calls_between_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    class Client:
        def __init__(self, servers: list[Any]) -> None:
            self._servers = servers

        def run(self) -> None:
            print("sum", sum(server.ask(abs, -index) for index, server in enumerate(self._servers)))

    program = probes(3)
    servers = [node.create_handle() for node in program.groups["probe"]]
    program.add_node(lp.PyClassNode(Client, servers), label="client")
    with launched(program) as run:
        pids = [run.client("probe", index).ask(os.getpid) for index in range(3)]
        assert len({agent_above(pid) for pid in pids}) == 2
        until(lambda: run.status()["probe"][1]["calls_per_s"])
        until(lambda: run.status()["client"][0]["state"] == "finished")
    assert "[client/0] sum 3" in capfd.readouterr().out
    assert "sum 3" in (run.run_dir / "logs" / "client-0.log").read_text()


def test_a_neighbour_on_another_host_that_stops_the_program_for_a_death_does_not_hide_it() -> None:
    def stop_once_unavailable(probe: Any) -> None:
        with pytest.raises(lp.Unavailable):
            probe.ask(os._exit, 3)
        lp.stop()

    program = probes(1)
    program.add_node(lp.PyNode(stop_once_unavailable, program.groups["probe"][0].create_handle()), label="user")
    with pytest.raises(lp.NodeError, match=r"probe/0.*exit code 3"):
        launched(program).wait(WITHIN_S)


def test_a_node_that_is_killed_is_known_at_once_with_its_host_and_last_lines() -> None:
    run = launched(probes())
    run.client("probe", 1).ask(print, "my last words")
    killed = time.monotonic()
    os.kill(run.status()["probe"][1]["pid"], signal.SIGKILL)
    until(lambda: run.failure is not None)
    assert time.monotonic() - killed < AT_ONCE_S
    with pytest.raises(lp.NodeError, match="killed by SIGKILL") as caught:
        run.wait(WITHIN_S)
    assert "probe/1 on local1 failed" in caught.value.report and "my last words" in caught.value.report


def test_an_agent_that_is_killed_is_the_loss_of_its_host_and_the_end_of_its_nodes() -> None:
    run = launched(probes())
    pids = [run.client("probe", index).ask(os.getpid) for index in range(2)]
    killed = time.monotonic()
    agent_of("local1").kill()
    until(lambda: run.failure is not None)
    assert time.monotonic() - killed < AT_ONCE_S
    with pytest.raises(lp.NodeError, match=r"HostLost: host 'local1' is lost: .*killed by SIGKILL"):
        run.wait(WITHIN_S)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), within_s=7.0)


@pytest.mark.slow
def test_a_host_that_goes_silent_is_lost_after_a_while() -> None:
    run = launched(probes(), host_timeout=1.0)
    pids = [run.client("probe", index).ask(os.getpid) for index in range(2)]
    frozen = time.monotonic()
    agent_of("local1").suspend()
    with pytest.raises(lp.NodeError, match="nothing was heard of it for 1 s"):
        run.wait(WITHIN_S)
    assert time.monotonic() - frozen < 6.0
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), within_s=7.0)


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed(script: "Callable[[str], subprocess.Popen[str]]") -> None:
    launcher = script(echo_script())
    assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
    family = psutil.Process(launcher.pid).children(recursive=True)
    assert len(family) >= 6  # agents, templates, nodes
    launcher.kill()
    _, alive = psutil.wait_procs(family, timeout=5.0)
    assert not alive


@pytest.mark.slow
def test_a_launcher_that_stalls_for_five_seconds_goes_on(script: "Callable[[str], subprocess.Popen[str]]") -> None:
    launcher = script(echo_script(then="time.sleep(6); print(run.client('echo', 1).echo('on'), flush=True)"))
    assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
    launcher.send_signal(signal.SIGSTOP)
    time.sleep(5)
    launcher.send_signal(signal.SIGCONT)
    assert launcher.stdout.readline() == "on\n"
    assert launcher.wait(WITHIN_S) == 0


class _HalfEngine(LocalEngine):
    """An engine one of whose hosts never hears of the run."""

    def hosts(self) -> list[HostOffer]:
        return [HostOffer("here"), HostOffer("away")]

    def start(self, invitation: Invitation) -> list[StartedAgent]:
        self._hosts = [HostOffer("here")]
        return list(super().start(invitation))


@pytest.mark.slow
def test_a_host_that_never_joins_is_named_after_the_deadline() -> None:
    with pytest.raises(lp.LaunchError, match="1 of 2 hosts have not joined: away"):
        lp.launch(probes(), "multi_host", engine=_HalfEngine(), join_timeout=8.0)  # the one that joins may be slow


@pytest.mark.parametrize("listen", ["192.0.2.77", "no-such-host.invalid"])
def test_an_address_that_is_not_of_this_host_is_named_with_those_that_are(listen: str) -> None:
    # "[Errno 99] cannot listen at tls:… (while attempting to bind on address …)" did not say which option was wrong.
    with pytest.raises(
        lp.LaunchError, match=f"^--listen={listen}: this host cannot listen there: .*It has the addresses"
    ):
        launched(probes(), listen=listen)


class _Failing(LocalEngine):
    def start(self, invitation: Invitation) -> list[StartedAgent]:
        nobody = Invitation(["127.0.0.1:9"], b"no credentials", invitation.log_dir)
        return list(super().start(nobody))


def test_an_agent_that_cannot_join_is_an_error_at_once_with_what_it_said() -> None:
    began = time.monotonic()
    with pytest.raises(lp.LaunchError, match=r"local0: its agent ended \(exit status 2\)(.|\n)*token-file"):
        lp.launch(probes(), "multi_host", engine=_Failing("1"))
    assert time.monotonic() - began < 10


@pytest.mark.slow
def test_a_node_restarts_on_its_host_and_is_found_again() -> None:
    with launched(probes(on_failure="restart")) as run:
        client = run.client("probe", 1)
        first = client.ask(os.getpid)
        os.kill(first, signal.SIGKILL)
        until(lambda: run.status()["probe"][1]["restarts"] == 1)
        second = client.ask(os.getpid)
        assert second != first
        assert run.client("probe", 0).ask(os.getpid) not in (first, second)


@pytest.mark.slow
def test_what_a_node_prints_without_end_stops_neither_the_others_nor_the_launcher() -> None:
    def shout() -> None:
        line = b"x" * 99 + b"\n"
        while not lp.stop_event().is_set():
            os.write(1, line * 500)

    program = probes()
    program.add_node(lp.PyNode(shout), label="shouting")
    with launched(program) as run:
        clients = [run.client("probe", index) for index in range(2)]
        for client in clients:
            client.ask(abs, -1)
        log = run.run_dir / "logs" / "shouting-0.log"
        until(lambda: log.exists() and log.stat().st_size > 5_000_000)
        slowest = 0.0
        for _ in range(20):
            for client in clients:
                began = time.monotonic()
                client.ask(abs, -1)
                slowest = max(slowest, time.monotonic() - began)
        assert slowest < 2.0


def test_modules_of_the_user_travel_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "only_on_the_launcher.py"
    source.write_text("FACTOR = 3\n\nclass Mine:\n    def times(self, value):\n        return FACTOR * value\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("only_on_the_launcher")
    source.unlink()  # as on another host
    program = lp.Program("shipped")
    handle = program.add_node(lp.CourierNode(module.Mine), label="mine")
    with launched(program) as run:
        assert run.client(handle).times(2) == 6
    del sys.modules["only_on_the_launcher"]


@pytest.mark.slow
def test_ports_of_users_own_servers_are_of_the_host_that_they_will_be_on() -> None:
    class Listener:
        def __init__(self, address: lp.Address) -> None:
            self._address = address

        def run(self) -> None:

            with socket.create_server(("", lp.get_port_from_address(self._address.resolve()))) as server:
                server.accept()[0].sendall(b"hello")

    def talk(address: lp.Address) -> None:

        host, _, port = address.resolve().rpartition(":")
        deadline = time.monotonic() + WITHIN_S
        while True:
            try:
                with socket.create_connection((host, int(port))) as client:
                    assert client.recv(5) == b"hello"
                    return
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    program = lp.Program("ports")
    address = lp.Address()
    listener = lp.PyClassNode(Listener, address)
    address.assign(listener)
    program.add_node(listener, label="listener")
    program.add_node(lp.PyNode(talk, address), label="talker")
    with launched(program) as run:
        run.wait(WITHIN_S)


@pytest.mark.slow
def test_what_the_hosts_do_not_have_is_refused_before_any_node_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"wants 100000 cores .*only 0 of them fit"):
        launched(probes(resources=lp.Resources(cpus=100_000)), run_dir=tmp_path)
    with pytest.raises(ValueError, match="host 'elsewhere', which is not one of local0, local1"):
        launched(probes(resources=lp.Resources(host="elsewhere")), run_dir=tmp_path)
    assert not list(tmp_path.glob("logs/probe*"))


@pytest.mark.slow
def test_groups_are_put_on_hosts_with_labels_apart_and_together() -> None:
    program = lp.Program("labels")
    wanted = {
        "feeder": lp.Resources(colocate_with="replica"),
        "replica": lp.Resources(placement="spread", host_labels=["fast"]),
        "table": lp.Resources(placement="pack", host_labels=["large"]),
    }
    for label, resources in wanted.items():
        with program.group(label, resources=resources):
            for _ in range(2):
                program.add_node(lp.CourierNode(Probe))
    with launched(program, "a:label=fast,b:label=large,c:label=fast:label=large") as run:
        hosts = {name: agent_of(name).pid for name in "abc"}
        nodes = {label: [run.client(label, index).ask(os.getpid) for index in range(2)] for label in wanted}
        found = {label: [agent_above(pid) for pid in pids] for label, pids in nodes.items()}
        assert found == {
            "feeder": [hosts["a"], hosts["c"]],
            "replica": [hosts["a"], hosts["c"]],
            "table": [hosts["b"], hosts["b"]],
        }


def test_timeouts_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="host_timeout=0: from 1 to 86400 seconds"):
        launched(probes(), host_timeout=0)
    with pytest.raises(ValueError, match="join_timeout=0: more than 0 seconds"):
        launched(probes(), join_timeout=0)
    for name in ("host_timeout", "join_timeout"):
        with pytest.raises(ValueError, match=f"{name}='8'"):
            launched(probes(), **{name: "8"})


def test_an_unknown_engine_is_an_error_that_names_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"unknown engine 'nomad'.* local, ssh, manual"):
        lp.launch(probes(), "multi_host", engine="nomad")


@pytest.mark.slow
def test_stacks_of_all_hosts_are_in_one_text() -> None:
    with launched(probes()) as run:
        for index in range(2):
            run.client("probe", index).ask(abs, -1)
        text = run.stacks()
    assert "host local0" in text and "host local1" in text and "node probe/1" in text
