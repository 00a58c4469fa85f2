"""Measure a launcher with many hosts: real coordinator, real connections, fake agents (benchmarks/fake_agents.py).

    python -m benchmarks.scale [--nodes 1000,3000,10000] [--per-host 20] [--quick] [--json FILE]

Each size runs in a fresh launcher. Memory is the launcher's highest; before is what it takes with the imports done and
the program not yet made. CPU is the launcher's own, in seconds; wall times share this machine with the agents.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lp_pipe as lp
from benchmarks.report import machine, show_table, write_json
from lp_pipe.connections import tls  # noqa: F401 - so that it counts as imported before
from lp_pipe.launch import multi_host
from lp_pipe.launch.engines import Engine, HostOffer, Invitation, StartedAgent
from lp_pipe.launch.hangs.hang_watch import HangWatch
from lp_pipe.launch.hosts.host_join import MultiHostOptions, Patience
from lp_pipe.launch.plan.launch_plan import make_plan
from lp_pipe.launch.run import Run
from lp_pipe.launch.tracing import Tracer
from lp_pipe.telemetry.metrics import MetricsLog

CROWDS = 5
IDLE_S = 5.0
PHASES = ("plan", "join", "start", "register", "resolve", "idle", "stop")


class Server:
    def ping(self) -> int:
        return 0


class FakeHosts(Engine):
    """An engine whose agents wait in processes that were started before."""

    is_local = True

    def __init__(self, hosts: str = "", **options: str) -> None:
        self._hosts = [HostOffer(f"host{index}") for index in range(int(hosts))]
        each = -(-len(self._hosts) // CROWDS)
        self._crowds = [_start_crowd(index * each, each) for index in range(CROWDS) if index * each < len(self._hosts)]
        self.called_at: dict[str, float] = {}

    def hosts(self) -> Sequence[HostOffer]:
        return self._hosts

    def start(self, invitation: Invitation) -> Sequence[StartedAgent]:
        self.called_at = clock()
        self._tell(do="join", addresses=list(invitation.addresses), secret=invitation.secret.decode())
        threading.Thread(target=self._answers, daemon=True).start()
        return []

    def ask(self, **command: Any) -> list[Any]:
        self._tell(**command)
        return self._answers()

    def close(self) -> None:
        for crowd in self._crowds:
            crowd.communicate()

    def _tell(self, **command: Any) -> None:
        for crowd in self._crowds:
            assert crowd.stdin is not None
            crowd.stdin.write(json.dumps(command) + "\n")
            crowd.stdin.flush()

    def _answers(self) -> list[Any]:
        return [json.loads(_line_of(crowd)) for crowd in self._crowds]


def _start_crowd(first: int, count: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.fake_agents", str(first), str(count)]
    crowd = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert _line_of(crowd) == "ready\n"
    return crowd


def _line_of(crowd: "subprocess.Popen[str]") -> str:
    assert crowd.stdout is not None
    return crowd.stdout.readline()


def clock() -> dict[str, float]:
    return {"wall_s": time.perf_counter(), "cpu_s": time.process_time()}


def memory_mib(field: str) -> float:
    """VmRSS or VmHWM of this process."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) / 1024


def measure(nodes: int, hosts: int, folder: str) -> dict[str, Any]:
    """Every phase of a program's life, in this process."""
    figures: dict[str, Any] = {"nodes": nodes, "hosts": hosts, "before_mib": memory_mib("VmRSS")}
    engine = FakeHosts(str(hosts))

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        began = clock()
        yield
        figures[name] = {key: value - began[key] for key, value in clock().items()}

    with phase("plan"):
        program = lp.Program("scale")
        with program.group("server"):
            for _ in range(nodes):
                program.add_node(lp.CourierNode(Server))
        plan = make_plan(program, pathlib.Path(folder), grace_s=60.0)
    with phase("join"):  # with the placing of the nodes; without their pickling, which is of the plan
        metrics = MetricsLog(plan.run_dir / "metrics.jsonl", ())
        began = clock()
        # Hundreds of agents share this machine with their launcher: they may well be late with signs of life.
        options = MultiHostOptions(engine, patience=Patience(join_s=300.0, silence_s=60.0))
        host, coordinator = multi_host.make_host(plan, metrics, options)
    for key, value in engine.called_at.items():
        figures["plan"][key] += value - began[key]
        figures["join"][key] -= value - began[key]
    run = Run(program, coordinator, host, metrics, HangWatch(coordinator, host, 60.0), Tracer(coordinator, host))
    with phase("start"):
        run.start()
    with phase("register"):
        engine.ask(do="registered")
    figures["rss_mib"] = memory_mib("VmRSS")
    addresses = {spec.node_id: spec.addresses[0] for spec in plan.nodes}
    with phase("resolve"):
        figures["questions"] = sum(engine.ask(do="resolve", addresses=addresses, common=addresses["server/0"]))
    with phase("idle"):
        time.sleep(IDLE_S)
    figures["threads"] = len(os.listdir("/proc/self/task"))
    with phase("stop"):
        run.stop()
    if run.failure is not None:
        raise run.failure
    figures["peak_mib"] = memory_mib("VmHWM")
    return figures


def in_fresh_launcher(nodes: int, per_host: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        hosts = str(-(-nodes // per_host))
        command = [sys.executable, "-m", "benchmarks.scale", "--one", str(nodes), hosts, folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def show(rows: Sequence[dict[str, Any]]) -> None:
    columns = [f"{row['nodes']} nodes, {row['hosts']} hosts" for row in rows]
    table = [
        [f"{name}, s (launcher's CPU)", *(f"{row[name]['wall_s']:.2f} ({row[name]['cpu_s']:.2f})" for row in rows)]
        for name in PHASES
    ]
    table += [
        ["questions where a server is", *(str(row["questions"]) for row in rows)],
        ["threads", *(str(row["threads"]) for row in rows)],
        ["memory before, MiB", *(f"{row['before_mib']:.0f}" for row in rows)],
        ["memory with all registered, MiB", *(f"{row['rss_mib']:.0f}" for row in rows)],
        ["highest memory, MiB", *(f"{row['peak_mib']:.0f}" for row in rows)],
    ]
    show_table(f"A launcher with many hosts (idle: {IDLE_S:g} s)", ["", *columns], table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1000,3000,10000", help="how many, one run for each (default: %(default)s)")
    parser.add_argument("--per-host", type=int, default=20, help="nodes of each host (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="200 nodes only")
    parser.add_argument("--json", type=pathlib.Path, help="where the figures go (default: stdout)")
    parser.add_argument("--one", nargs=3, metavar=("NODES", "HOSTS", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        nodes, hosts, folder = arguments.one
        write_json(measure(int(nodes), int(hosts), folder), None)
        return
    sizes = "200" if arguments.quick else arguments.nodes
    rows = [in_fresh_launcher(int(nodes), arguments.per_host) for nodes in sizes.split(",")]
    show(rows)
    write_json({"benchmark": "scale", "machine": machine(), "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
