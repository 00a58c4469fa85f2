"""`lp_pipe launch` for several hosts: what it prints, plans and refuses."""

import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import lp_pipe as lp
from lp_pipe.cli.errors import NotLaunched
from lp_pipe.cli.launch import _wait
from lp_pipe.graph import GraphView
from tests.cli.commands import Command, Start

PROGRAM = """
import os
import lp_pipe as lp

class Server:
    def pid(self):
        return os.getpid()

def ask(servers):
    print("asked", len({server.pid() for server in servers}))
    lp.stop()

program = lp.Program("asking")
with program.group("server"):
    servers = [program.add_node(lp.CourierNode(Server)) for _ in range(2)]
with program.group("asking"):
    program.add_node(lp.PyNode(ask, servers))
"""


@pytest.fixture
def target(folder: Path) -> str:
    (folder / "asking.py").write_text(PROGRAM)
    return "asking.py"


def test_a_dry_run_says_which_node_would_run_where_and_starts_none(target: str, brief_command: Command) -> None:
    done = brief_command("launch", target, "--mode=multi_host", "--hosts=a,b", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "server/0  a",
        "server/1  b",
        "asking/0  a",
        "asking/0 -> server/0  calls",
        "asking/0 -> server/1  calls",
    ]
    assert not Path("runs").exists()


def test_a_dry_run_with_json_prints_events_like_a_launch(target: str, brief_command: Command) -> None:
    done = brief_command("launch", target, "--dry-run", "--json")
    graph, plan = map(json.loads, done.stdout.splitlines())
    assert (graph["event"], graph["program"], plan["event"]) == ("graph", "asking", "plan")
    assert plan["lines"][:2] == ["server/0  this host", "server/1  this host"]


def test_a_dry_run_for_a_cluster_prints_the_manifest_below_the_places(target: str, brief_command: Command) -> None:
    flags = ["--mode=multi_host", "--engine=kubernetes", "--hosts=2:cpus=4", "--image=train:1", "--namespace=team"]
    done = brief_command("launch", target, *flags, "--kind=job", "--run-as-user=1000", "--dry-run")
    assert done.returncode == 0, done.stderr
    places, _, manifest = done.stdout.partition("\n\n")
    assert places.splitlines()[:3] == ["server/0  host-0", "server/1  host-1", "asking/0  host-0"]
    secret, service, job = yaml.safe_load_all(manifest)
    assert [one["kind"] for one in (secret, service, job)] == ["Secret", "Service", "Job"]
    assert secret["stringData"] == {"secret": "LEFT-OUT"} and job["spec"]["completions"] == 2
    assert job["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 1000
    assert "--transport" not in manifest
    over_grpc = brief_command("launch", target, *flags, "--transport=grpc", "--dry-run").stdout
    assert "--transport" in over_grpc
    refused = brief_command("launch", target, *flags[:2], "--hosts=2", "--dry-run")
    assert refused.returncode == 3 and "engine 'kubernetes': image" in refused.stderr


CARRIERS = """
import sys
import lp_pipe as lp

class Server:
    def carriers(self):
        return [name for name in ("grpc_stream", "tls") if f"lp_pipe.connections.{name}" in sys.modules]

def ask(server):
    print("carriers:", *server.carriers())
    lp.stop()

def make_program(num_hosts: int = 2):
    program = lp.Program("carriers")
    server = program.add_node(lp.CourierNode(Server), label="server")
    program.add_node(lp.PyNode(ask, server), label="asking")
    return program
"""


@pytest.mark.slow
def test_elastic_and_resumed_runs_use_the_transport_as_well(folder: Path, command: Command) -> None:
    (folder / "carriers.py").write_text(CARRIERS)
    flags = ["--mode=multi_host", "--transport=grpc", "--hosts=2"]
    elastic = command("launch", "carriers.py:make_program", *flags, "--elastic=1:2")
    assert "[asking/0] carriers: grpc_stream\n" in elastic.stdout, elastic.stderr
    first = command("launch", "carriers.py", *flags, "--run-dir=first")
    assert "[asking/0] carriers: grpc_stream\n" in first.stdout, first.stderr
    resumed = command("launch", "--resume=first")
    assert "[asking/0] carriers: grpc_stream\n" in resumed.stdout, resumed.stderr


@pytest.mark.slow
def test_a_program_on_several_hosts_prints_and_ends_as_on_one(target: str, command: Command) -> None:
    done = command("launch", target, "--mode=multi_host", "--engine=local", "--hosts=2")
    assert done.returncode == 0, done.stderr
    assert "[asking/0] asked 2" in done.stdout


@pytest.mark.slow
def test_another_terminal_sees_and_stops_a_run_on_several_hosts(
    target: str, brief_command: Command, start: Start
) -> None:
    Path(target).write_text(PROGRAM.replace("    lp.stop()\n", "    lp.wait_for_stop()\n"))
    run = start("launch", target, "--mode=multi_host", "--run-dir=here")
    run.wait_for("asked 2")
    status = brief_command("status", "here")
    assert "multi_host mode" in status.stdout and len(re.findall("running", status.stdout)) == 3, status.stdout
    stacks = brief_command("stacks", "here").stdout
    assert "on local0" in stacks and "node server/1" in stacks
    assert "asked 2" in brief_command("logs", "here", "asking").stdout
    assert brief_command("stop", "here").returncode == 0
    assert run.finish()[0] == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--hosts=a,b"], "--hosts .*--mode=multi_host"),
        (["--mode=multi_host", "--engine=nomad"], "unknown engine 'nomad'.* local, ssh, manual"),
        (["--mode=multi_host", "--engine-option=x"], "--engine-option=x.*NAME=VALUE"),
        (["--join-timeout=0"], "--join-timeout .*--mode=multi_host"),
        (["--elastic=1:2"], "add --mode=multi_host"),
        (["--mode=multi_host", "--elastic=4"], "'4'.*MIN:MAX"),
        (["--mode=multi_host", "--elastic=1:2", "--dry-run"], "--elastic .*--dry-run"),
        (["--mode=multi_host", "--elastic=1:2"], "needs a function that takes the number of hosts"),
    ],
)
def test_options_that_make_no_sense_are_wrong_usage(
    flags: list[str], said: str, target: str, brief_command: Command
) -> None:
    done = brief_command("launch", target, *flags)
    assert done.returncode == 2 and re.search(said, done.stderr)


def test_what_no_host_has_is_said_before_anything_starts(target: str, command: Command) -> None:
    done = command("launch", target, "--mode=multi_host", "--hosts=a:gpus=99")
    assert done.returncode == 3
    assert "host 'a': hosts= says gpus=99, but its agent has found" in done.stderr


@pytest.mark.slow
def test_an_elastic_program_is_made_for_the_hosts_that_there_are(folder: Path, command: Command) -> None:
    made = (
        PROGRAM.partition("program = ")[0]
        + """
def make_program(num_hosts):
    program = lp.Program("asking")
    with program.group("server"):
        servers = [program.add_node(lp.CourierNode(Server)) for _ in range(num_hosts)]
    with program.group("asking"):
        program.add_node(lp.PyNode(ask, servers))
    return program
"""
    )
    (folder / "elastic.py").write_text(made)
    done = command("launch", "elastic.py", "--mode=multi_host", "--hosts=3", "--elastic=1:2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[asking/0] asked 2" in done.stdout and "done in" in done.stdout


def test_an_elastic_program_that_does_not_fit_the_hosts_that_are_left_ends_without_a_traceback(tmp_path: Path) -> None:
    def wait() -> None:
        raise ValueError("group 'stages' wants 4 GPUs, host a has 2")

    def nothing(*args: object) -> None: ...

    run: Any = SimpleNamespace(is_over=True, wait=wait, stop=nothing, status=nothing, run_dir=tmp_path)
    display: Any = SimpleNamespace(started=nothing, status=nothing, suspended=contextlib.nullcontext)
    with pytest.raises(NotLaunched, match="wants 4 GPUs"):
        _wait(run, display, GraphView.of(lp.Program("elastic")), SimpleNamespace(look=nothing), None)  # type: ignore[arg-type]
