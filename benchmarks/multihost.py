"""Measure the cost of two hosts: calls, a pipeline of two stages, and the start, beside a lower bound of each.

    python -m benchmarks.multihost [--repeats 7] [--quick] [--json FILE]

The hosts are network namespaces with an sshd each (root), joined without a limit of bandwidth; all share this machine's
cores, and stages compute with one thread. Calls: `add(1, 2)` from one host to the other, beside grpcio's with the same
certificates. Throughput: steps of one model in multi_host mode over TLS (channel="tls") and over gloo, beside process
mode; all run at once and take turns.
Start: from launch() until 4 nodes that import torch have answered, 2 on each host, beside `python -c "import torch"`
by ssh on both hosts at once.
"""

import argparse
import base64
import contextlib
import json
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import lp_pipe as lp
import lp_pipe.pipeline as pp
from benchmarks.launch import Worker
from benchmarks.multihost_party import RAW
from benchmarks.pipeline import Feeder, lp_pipe_turn
from benchmarks.report import machine, show_table, spread, write_json
from benchmarks.workloads import MODELS, QUICK_MODELS, Workload
from lp_pipe.connections.credentials import generate_credentials
from lp_pipe.launch.engines import SshEngine
from tests.launch.engines import namespaces
from tests.launch.engines.namespaces import Hosts

GOALS = {"calls": 0.8, "throughput": 0.95, "start": 2.0}
BASES = {"calls": RAW, "throughput": "process mode", "start": 'ssh python -c "import torch"'}
_NODES = 4
_WARMUP_STEPS = 3

Values = dict[str, list[float]]


def calls(hosts: Hosts, rounds: int, count: int) -> Values:
    """Microseconds."""
    secret = base64.b64encode(generate_credentials().to_bytes()).decode() + "\n"
    with _party(hosts, "h2", "serve", hosts.address("h2")) as server:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(secret)
        server.stdin.flush()
        endpoints = server.stdout.readline().strip()
        with _party(hosts, "h1", "call", endpoints, str(rounds), str(count)) as client:
            said, _ = client.communicate(secret)
    found: Values = json.loads(said)
    return found


def throughput(hosts: Hosts, workload: Workload, rounds: int, steps: int) -> Values:
    """Samples a second."""
    parties = {BASES["throughput"]: "", "2 hosts, tls": "tls", "2 hosts, gloo": "gloo"}
    found: Values = {name: [] for name in parties}
    with contextlib.ExitStack() as stack:
        clients = {name: stack.enter_context(_pipeline(hosts, workload, kind)) for name, kind in parties.items()}
        for client in clients.values():
            lp_pipe_turn(client, _WARMUP_STEPS)
        for _ in range(rounds):
            for name, client in clients.items():
                found[name].append(workload.batch_size * steps / sum(lp_pipe_turn(client, steps).step_s))
    return found


def start(hosts: Hosts, rounds: int) -> Values:
    """Seconds."""
    found: Values = {BASES["start"]: [], "lp_pipe, 2 hosts x 2 nodes": []}
    for _ in range(rounds):
        found[BASES["start"]].append(_import_torch(hosts))
        found["lp_pipe, 2 hosts x 2 nodes"].append(_start_nodes(hosts))
    return found


@contextlib.contextmanager
def _party(hosts: Hosts, host: str, *words: str) -> Iterator["subprocess.Popen[str]"]:
    command = shlex.join([hosts.python, "-m", "benchmarks.multihost_party", *words])
    ssh = ["ssh", "-F", hosts.ssh_config, host, command]
    with subprocess.Popen(ssh, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def _pipeline(hosts: Hosts, workload: Workload, kind: str) -> Iterator[pp.PipelineClient]:
    """kind: of the channels; "": in process mode."""
    program = lp.Program(f"bench_{workload.name}")
    resources = lp.Resources(host="h1") if kind else lp.Resources()
    with program.group("feeder", resources=resources):
        feeder = program.add_node(lp.CourierNode(Feeder, workload))
    stages: Any = {"stages": [workload.cut], "schedule": "1f1b", "microbatches": 8, "inputs": feeder}
    handle = pp.add_pipeline(program, workload.model(), channel=kind or "auto", **stages)
    with _launched(hosts, program, is_far=bool(kind)) as run:
        yield run.client(handle)


@contextlib.contextmanager
def _launched(hosts: Hosts, program: lp.Program, *, is_far: bool) -> Iterator[lp.Run]:
    engine = SshEngine(",".join(hosts.names), ssh_config=hosts.ssh_config, python=hosts.python)
    options: dict[str, Any] = {"engine": engine} if is_far else {}
    with tempfile.TemporaryDirectory() as folder:
        mode = "multi_host" if is_far else "process"
        with lp.launch(program, mode, run_dir=f"{folder}/run", **options) as run:
            yield run


def _import_torch(hosts: Hosts) -> float:
    began = time.perf_counter()
    command = shlex.join([hosts.python, "-c", "import torch"])
    started = [subprocess.Popen(["ssh", "-F", hosts.ssh_config, name, command]) for name in hosts.names]
    for process in started:
        assert process.wait() == 0, "ssh"
    return time.perf_counter() - began


def _start_nodes(hosts: Hosts) -> float:
    program = lp.Program("bench_start")
    with program.group("workers"):
        handles = [program.add_node(lp.CourierNode(Worker, "torch")) for _ in range(_NODES)]
    began = time.perf_counter()
    with _launched(hosts, program, is_far=True) as run:
        for reply in [run.client(handle).futures.ping() for handle in handles]:
            reply.result()
        return time.perf_counter() - began


def summary(values: Values, base: str) -> dict[str, Any]:
    """Return each party's figures, and their ratio to the base's of the same round."""
    return {
        name: {"figures": spread(own), "ratio": spread(a / b for a, b in zip(own, values[base], strict=True))}
        for name, own in values.items()
    }


def show(title: str, parties: dict[str, Any], unit: str, goal: str) -> None:
    rows = []
    for name, party in parties.items():
        figures, ratio = party["figures"], party["ratio"]
        cells = [f"{figures[which]:,.4g}" for which in ("median", "min", "max")]
        rows.append([name, f"{cells[0]} ({cells[1]}–{cells[2]})", *(f"{ratio[key]:.2f}x" for key in ("median", "min"))])
    show_table(f"{title}; goal: {goal}", ["", f"{unit}, median (min–max)", "ratio, median", "min"], rows)


def measure(hosts: Hosts, *, is_quick: bool, repeats: int) -> dict[str, Any]:
    models = QUICK_MODELS if is_quick else MODELS
    figures: dict[str, Any] = {"calls": summary(calls(hosts, repeats, 50 if is_quick else 500), BASES["calls"])}
    show("Calls between hosts", figures["calls"], "µs", f"{GOALS['calls']}x")
    for name, workload in models.items():
        found = summary(throughput(hosts, workload, repeats, 2 if is_quick else 8), BASES["throughput"])
        figures[f"throughput of {name}"] = found
        show(f"Pipeline of 2 stages, {name}", found, "samples/s", f"at least {GOALS['throughput']}x")
    figures["start"] = summary(start(hosts, repeats), BASES["start"])
    show("Start", figures["start"], "s", f"{GOALS['start']}x")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--quick", action="store_true", help="tiny models, few steps: only to see that it works")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    figures: dict[str, Any] = {"skipped": namespaces.why_not()}
    if figures["skipped"]:
        print(f"skipped: {figures['skipped']}")
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # namespaces do not go by themselves
        hosts = Hosts(2)
        try:
            figures = measure(hosts, is_quick=options.quick, repeats=2 if options.quick else options.repeats)
        finally:
            hosts.close()
    write_json({"benchmark": "multihost", "machine": machine(), "goals": GOALS, "figures": figures}, options.json)


if __name__ == "__main__":
    main()
