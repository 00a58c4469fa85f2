"""Measure sums by servers beside gloo's ring: bytes and seconds, the priority of front layers, and compression.

    python -m benchmarks.servers [--json FILE] [--rounds N] [--quick]

4 workers and up to 4 servers are processes in network namespaces, each with a link of 200 Mbit/s in both directions
(root). A round sums 16 MiB of gradients by each method. "sent" is what a worker has sent, without the headers of
packets, by the bytes of the gradients. The methods of a round alternate, so that a busy machine slows all of them.
"""

import argparse
import base64
import contextlib
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import namespaces
from benchmarks.namespaces import Host
from benchmarks.report import machine, show_table, spread, write_json
from lp_pipe.collectives.compression import TopK
from lp_pipe.collectives.push_pull import PushPull, PushPullOptions, server_shares
from lp_pipe.collectives.sum_server import SumServer
from lp_pipe.connections.credentials import Credentials, generate_credentials, use_credentials
from lp_pipe.membership import Membership

WORKERS = 4
RATE = 25e6  # bytes per second of each link, each way
GRADIENTS = 16 << 20  # bytes
SERVERS = {"k = 4": 4, "k = 2": 2, "k = 0": 0, "top-k 1 %": 4}
METHODS = ("gloo", *SERVERS)
BYTES = {"gloo": 1.5, "k = 4": 1.0, "k = 2": 1.2, "k = 0": 1.5, "top-k 1 %": 0.03}
FASTER = {"k = 4": 1.3, "k = 2": 1.05, "k = 0": 0.95}  # than gloo, at least
_PORT = 7000
_HEADER_BYTES = 66  # of Ethernet, IP and TCP with timestamps


# --- a worker or a server ---


def _endpoint(address: str, method: str) -> str:
    return f"tls:{address}:{_PORT + METHODS.index(method)}"


def serve(job: dict[str, Any]) -> None:
    servers = [SumServer(_endpoint(job["address"], method), job["name"]) for method in SERVERS]
    print("ready", flush=True)
    sys.stdin.read()
    del servers


def _push_pull(job: dict[str, Any], method: str, own: SumServer, rank: int) -> PushPull:
    members = tuple(f"workers/{number}" for number in range(WORKERS))
    far, near = server_shares(WORKERS, SERVERS[method], is_colocated=True)
    ends: list[str | None] = [_endpoint(address, method) for address in job["servers"][: SERVERS[method]]]
    shares = [far] * len(ends)
    if near:
        ends += [None if other == rank else _endpoint(one, method) for other, one in enumerate(job["workers"])]
        shares += [near] * WORKERS
    options = PushPullOptions(compression=TopK(0.01) if method.startswith("top-k") else None)
    return PushPull(Membership("workers", 0, rank, members, ()), ends, shares, options, own)


def work(job: dict[str, Any]) -> None:
    """Sum as often as asked for on stdin, by the method that is named there; print the seconds."""
    rank = job["rank"]
    own = {method: SumServer(_endpoint(job["address"], method), job["name"]) for method in SERVERS}
    print("ready", flush=True)
    sys.stdin.readline()
    dist.init_process_group("gloo", f"tcp://{job['workers'][0]}:{_PORT - 1}", rank=rank, world_size=WORKERS)
    push_pull = {method: _push_pull(job, method, own[method], rank) for method in SERVERS}
    gradients = torch.randn(GRADIENTS // 4, generator=torch.Generator().manual_seed(rank))
    for line in sys.stdin:
        method = line.strip()
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        if method == "gloo":
            dist.all_reduce(gradients)
        else:
            push_pull[method].begin("gradients", [gradients], gradients, turn=0).wait()
        print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]), flush=True)
        gradients.mul_(0.25)


# --- all of them ---


@contextlib.contextmanager
def _party(host: Host, job: dict[str, Any]) -> Iterator["subprocess.Popen[str]"]:
    environment = ("env", f"GLOO_SOCKET_IFNAME={host.device}", "CUDA_VISIBLE_DEVICES=")
    command = host.command(*environment, sys.executable, "-m", "benchmarks.servers", "--party")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            _tell([process], json.dumps(job))
            yield process
        finally:
            process.kill()


def _tell(parties: Sequence["subprocess.Popen[str]"], line: str) -> None:
    for party in parties:
        assert party.stdin is not None, "it is a pipe"
        party.stdin.write(line + "\n")
        party.stdin.flush()


def _answers(parties: Sequence["subprocess.Popen[str]"]) -> list[str]:
    found = []
    for party in parties:
        assert party.stdout is not None, "it is a pipe"
        found.append(party.stdout.readline().strip())
        if not found[-1]:
            raise SystemExit("a party has ended; its error is above")
    return found


def measure(rounds: int, methods: Sequence[str]) -> dict[str, Any]:
    """Return seconds, bytes by those of the gradients, and seconds of a processor, of each method."""
    problem = namespaces.why_not()
    if problem:
        return {"skipped": problem}
    try:
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(namespaces.hosts_on_a_switch(2 * WORKERS, RATE))
            return _measure_on(hosts, stack, rounds, methods)
    except subprocess.CalledProcessError as error:
        return {"skipped": f"{' '.join(map(str, error.cmd))}: {error.stderr.strip()}"}


def _measure_on(
    hosts: Sequence[Host], stack: contextlib.ExitStack, rounds: int, methods: Sequence[str]
) -> dict[str, Any]:
    addresses = [host.address for host in hosts]
    shared = {
        "credentials": base64.b64encode(generate_credentials().to_bytes()).decode(),
        "workers": addresses[:WORKERS],
        "servers": addresses[WORKERS:],
    }
    jobs = [{**shared, "address": host.address, "rank": rank, "name": f"{rank}"} for rank, host in enumerate(hosts)]
    parties = [stack.enter_context(_party(host, job)) for host, job in zip(hosts, jobs, strict=True)]
    _answers(parties)
    workers = parties[:WORKERS]
    _tell(workers, "connect")
    found: dict[str, Any] = {method: {"s": [], "sent": [], "cpu_s": [], "all_cpu_s": []} for method in methods}
    for turn in range(rounds + 1):
        for method in methods:
            before, cpu = [host.sent_bytes(_HEADER_BYTES) for host in hosts[:WORKERS]], _cpu_s(parties)
            _tell(workers, method)
            answers = [json.loads(answer) for answer in _answers(workers)]
            sent = [host.sent_bytes(_HEADER_BYTES) - one for host, one in zip(hosts, before, strict=False)]
            if turn:  # the first one has warmed up
                found[method]["s"].append(max(seconds for seconds, _ in answers))
                found[method]["cpu_s"].append(max(seconds for _, seconds in answers))
                found[method]["all_cpu_s"].append(_cpu_s(parties) - cpu)
                found[method]["sent"].append(max(sent) / GRADIENTS)
    return {method: {name: spread(values) for name, values in figures.items()} for method, figures in found.items()}


def _cpu_s(parties: Sequence["subprocess.Popen[str]"]) -> float:
    """Return the processor time of all processes."""
    ticks = 0
    for party in parties:
        fields = pathlib.Path(f"/proc/{party.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def show(figures: dict[str, Any]) -> None:
    if "skipped" in figures:
        print(f"Servers: skipped: {figures['skipped']}")
        return
    rows = []
    for method, found in figures.items():
        faster = figures["gloo"]["s"]["median"] / found["s"]["median"] if "gloo" in figures else float("nan")
        rows.append(
            [
                method,
                f"{found['sent']['median']:.3f}",
                f"{BYTES[method]:.2f}",
                f"{found['s']['median']:.3f} ({found['s']['min']:.3f}–{found['s']['max']:.3f})",
                f"{faster:.2f}",
                f"{FASTER[method]:.2f}" if method in FASTER else "",
                f"{found['all_cpu_s']['median']:.2f}",
            ]
        )
    columns = ["", "sent x", "bar", "s (min–max)", "gloo's time / this", "bar", "CPU s of all"]
    show_table("4 workers, links of 200 Mbit/s, 16 MiB of gradients", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--quick", action="store_true", help="one round: only to see that it works")
    parser.add_argument("--party", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.party:
        torch.set_num_threads(1)
        logging.getLogger().setLevel(logging.ERROR)
        job = json.loads(sys.stdin.readline())
        use_credentials(Credentials.from_bytes(base64.b64decode(job["credentials"])))
        (work if job["rank"] < WORKERS else serve)(job)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # namespaces do not go by themselves
    before = os.getloadavg()[0]
    figures = measure(1 if options.quick else options.rounds, options.methods.split(","))
    show(figures)
    print(f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores")
    write_json({"benchmark": "servers", "machine": machine(), "figures": figures}, options.json)


if __name__ == "__main__":
    main()
