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
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from benchmarks import namespaces
from benchmarks.namespaces import Host, answers_of, started_party, tell
from benchmarks.report import machine, show_table, spread, write_json
from lp_pipe.channels import ChannelHub
from lp_pipe.collectives.compression import TopK
from lp_pipe.collectives.direct import joined_by_channels
from lp_pipe.collectives.group import Group
from lp_pipe.collectives.push_pull import PushPull, PushPullOptions, server_shares
from lp_pipe.collectives.sum_server import SumServer
from lp_pipe.connections.credentials import Credentials, generate_credentials, use_credentials
from lp_pipe.context import NodeContext, enter_process
from lp_pipe.data_parallel.workers import ReplicaOptions, ReplicaWorkers
from lp_pipe.membership import Membership

WORKERS = 4
RATE = 25e6  # bytes per second of each link, each way
GRADIENTS = 16 << 20  # bytes
SERVERS = {"k = 4": 4, "k = 2": 2, "k = 0": 0, "top-k 1 %": 4}
METHODS = ("gloo", *SERVERS)
BYTES = {"gloo": 1.5, "k = 4": 1.0, "k = 2": 1.2, "k = 0": 1.5, "top-k 1 %": 0.03}
PRIORITY, ASYNC = 0.85, 0.95
FASTER = {"k = 4": 1.3, "k = 2": 1.05, "k = 0": 0.95}  # than gloo, at least
_PORT = 7000
_LAYERS, _FORWARD_S, _BACKWARD_S = 8, 0.03, 0.03
_WARM_UP = 2  # steps
_ASYNC_STEPS, _ASYNC_S = 60, 0.05
_HEADER_BYTES = 66  # of Ethernet, IP and TCP with timestamps


# --- a worker or a server ---


def _endpoint(address: str, method: str) -> str:
    return f"tls:{address}:{_PORT + METHODS.index(method)}"


def serve(job: dict[str, Any]) -> None:
    servers = [SumServer(_endpoint(job["address"], method), job["name"]) for method in SERVERS]
    print("ready", flush=True)
    sys.stdin.read()
    del servers


def _push_pull(
    job: dict[str, Any], method: str, own: SumServer, rank: int, *, has_priority: bool = True, generation: int = 0
) -> PushPull:
    members = tuple(f"workers/{number}" for number in range(WORKERS))
    far, near = server_shares(WORKERS, SERVERS[method], is_colocated=True)
    ends: list[str | None] = [_endpoint(address, method) for address in job["servers"][: SERVERS[method]]]
    shares = [far] * len(ends)
    if near:
        ends += [None if other == rank else _endpoint(one, method) for other, one in enumerate(job["workers"])]
        shares += [near] * WORKERS
    compression = TopK(0.01) if method.startswith("top-k") else None
    options = PushPullOptions(priority=has_priority, compression=compression)
    return PushPull(Membership("workers", generation, rank, members, ()), ends, shares, options, own)


def work(job: dict[str, Any]) -> None:
    """Sum as often as asked for on stdin, by the method that is named there; print the seconds."""
    rank = job["rank"]
    own = {method: SumServer(_endpoint(job["address"], method), job["name"]) for method in SERVERS}
    print("ready", flush=True)
    sys.stdin.readline()
    dist.init_process_group("gloo", f"tcp://{job['workers'][0]}:{_PORT - 1}", rank=rank, world_size=WORKERS)
    push_pull = {method: _push_pull(job, method, own[method], rank) for method in SERVERS}
    generation = 0
    gradients = torch.randn(GRADIENTS // 4, generator=torch.Generator().manual_seed(rank))
    for line in sys.stdin:
        method = line.strip()
        dist.barrier()
        if method.startswith("steps"):
            _, priority, count = method.split()
            generation += 1
            links = _push_pull(job, "k = 4", own["k = 4"], rank, has_priority=priority == "True", generation=generation)
            print(json.dumps([_step_seconds(job, links, int(count)), 0.0]), flush=True)
            continue
        began, cpu = time.perf_counter(), time.process_time()
        if method == "gloo":
            dist.all_reduce(gradients)
        else:
            push_pull[method].begin("gradients", [gradients], gradients, turn=0).wait()
        print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]), flush=True)
        gradients.mul_(0.25)


class SleepingLayer(nn.Module):
    """Passes its input on; its forward and its backward sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(GRADIENTS // 4 // _LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Sleep.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return found


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(_FORWARD_S)
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(_BACKWARD_S)
        return gradients[0], torch.ones_like(ctx.saved_tensors[0])


class _NoServices:
    """The services of a launcher, for a worker without one."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _replica(job: dict[str, Any], push_pull: PushPull) -> dp.Replica:
    """Return this worker's replica, without a program: the other collectives go through channels."""
    rank = job["rank"]
    node = NodeContext("workers", rank, WORKERS, lp.Resources(), pathlib.Path("/tmp"), _NoServices())
    enter_process(node)
    members = tuple(f"workers/{number}" for number in range(WORKERS))
    port = _PORT + len(METHODS) + job["replicas"]
    job["replicas"] += 1
    membership = Membership("workers", 0, rank, members, tuple(b"%d" % number for number in range(WORKERS)))
    hub = ChannelHub(f"tls:{job['address']}:{port}", members[rank])
    dist.barrier()
    backend = joined_by_channels(membership, hub, [f"tls:{address}:{port}" for address in job["workers"]])
    group = Group(membership, backend, push_pull)
    return dp.Replica(ReplicaWorkers(ReplicaOptions("workers", WORKERS, WORKERS, WORKERS), node, lambda _: group))


def _step_seconds(job: dict[str, Any], push_pull: PushPull, steps: int) -> float:
    """Return the seconds of a step of a model of sleeping layers, in the usual loop.

    From a step's beginning to a later one's, when as many sums are on their way. In theory a step takes 0.94 s without
    priority and 0.78 s with it, 0.83 of the time: the link is busy for 0.67 s, and the front layer's sum takes 0.08 s.
    """
    replica = _replica(job, push_pull)
    model = nn.Sequential(*(SleepingLayer() for _ in range(_LAYERS)))
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 1e-3), model)
    batch, began = (torch.ones(WORKERS, 4), torch.ones(WORKERS)), 0.0
    ended = began
    for step in replica.steps(_WARM_UP + steps + 1, model=model):  # one more: the last sums are waited for
        if step == _WARM_UP:
            began = time.perf_counter()
        elif step == _WARM_UP + steps:
            ended = time.perf_counter()
        for x, _, weight in replica.shards(batch):
            (model(x.requires_grad_()).mean() * weight).backward()
        optimizer.step()
    model.state_dict()  # waits for the last updates
    return (ended - began) / steps


# --- asynchronous training ---


def _async_loop(replica: dp.Replica, slow: int, folder: str) -> None:
    model = nn.Linear(256, 256)
    optimizer = replica.optimizer(torch.optim.Adam(model.parameters()), model)
    batch = torch.ones(replica.num_replicas, 256), torch.ones(replica.num_replicas, 256)
    began, steps = 0.0, _WARM_UP + _ASYNC_STEPS // (slow if replica.rank == 0 else 1)
    for step in replica.steps(_WARM_UP + _ASYNC_STEPS, model=model):
        if step == _WARM_UP:
            began = time.perf_counter()
        time.sleep(_ASYNC_S * (slow if replica.rank == 0 else 1))
        for x, y, weight in replica.shards(batch):
            (nn.functional.mse_loss(model(x), y) * weight).backward()
        optimizer.step()
        if step == steps - 1:
            rate = (steps - _WARM_UP) / (time.perf_counter() - began)
            (pathlib.Path(folder) / f"{replica.rank}.rate").write_text(str(rate))


def async_rates(slow: int) -> list[float]:
    """Return the steps per second of each worker, of which the first one is so many times slower."""
    with tempfile.TemporaryDirectory() as folder:
        program = lp.Program("async")
        dp.add_replicas(program, _async_loop, slow, folder, replicas=WORKERS, backend=dp.Servers(2), mode="async")
        lp.launch(program, mode="process", run_dir=pathlib.Path(folder) / "run").wait()
        return [float((pathlib.Path(folder) / f"{rank}.rate").read_text()) for rank in range(WORKERS)]


# --- all of them ---


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
    parties = [
        stack.enter_context(started_party(host, "benchmarks.servers", job))
        for host, job in zip(hosts, jobs, strict=True)
    ]
    answers_of(parties)
    workers = parties[:WORKERS]
    tell(workers, "connect")
    found: dict[str, Any] = {method: {"s": [], "sent": [], "cpu_s": [], "all_cpu_s": []} for method in methods}
    for turn in range(rounds + 1):
        for method in methods:
            before, cpu = [host.sent_bytes(_HEADER_BYTES) for host in hosts[:WORKERS]], _cpu_s(parties)
            tell(workers, method)
            answers = [json.loads(answer) for answer in answers_of(workers)]
            sent = [host.sent_bytes(_HEADER_BYTES) - one for host, one in zip(hosts, before, strict=False)]
            if turn:  # the first one has warmed up
                found[method]["s"].append(max(seconds for seconds, _ in answers))
                found[method]["cpu_s"].append(max(seconds for _, seconds in answers))
                found[method]["all_cpu_s"].append(_cpu_s(parties) - cpu)
                found[method]["sent"].append(max(sent) / GRADIENTS)
    sums = {method: {name: spread(values) for name, values in figures.items()} for method, figures in found.items()}
    steps: dict[str, list[float]] = {"True": [], "False": []}
    for _ in range(max(1, rounds // 3)):
        for priority, seconds in steps.items():
            tell(workers, f"steps {priority} {rounds}")
            seconds.append(max(json.loads(answer)[0] for answer in answers_of(workers)))
    return {"sums": sums, "with priority": spread(steps["True"]), "without priority": spread(steps["False"])}


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
    sums = figures["sums"]
    for method, found in sums.items():
        faster = sums["gloo"]["s"]["median"] / found["s"]["median"] if "gloo" in sums else float("nan")
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
    kinds = ("with priority", "without priority")
    with_it, without = (figures[kind]["median"] for kind in kinds)
    print(f"a step of {_LAYERS} sleeping layers, 4 servers: {with_it:.3f} s with priority, {without:.3f} s without: ")
    print(f"    {with_it / without:.2f} (bar: at most {PRIORITY:.2f})")


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
        job["replicas"] = 0  # made so far
        use_credentials(Credentials.from_bytes(base64.b64decode(job["credentials"])))
        (work if job["rank"] < WORKERS else serve)(job)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # namespaces do not go by themselves
    before = os.getloadavg()[0]
    figures = measure(1 if options.quick else options.rounds, options.methods.split(","))
    show(figures)
    alike, mixed = async_rates(1), async_rates(4)
    kept = sum(mixed[1:]) / sum(alike[1:])
    print(f"async: with one worker 4 times slower the others keep {kept:.3f} of their rate (bar: at least {ASYNC:.2f})")
    figures["async"] = {"alike": alike, "one is slow": mixed, "kept": kept}
    print(f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores")
    write_json({"benchmark": "servers", "machine": machine(), "figures": figures}, options.json)


if __name__ == "__main__":
    main()
