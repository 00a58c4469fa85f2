"""Measure sums between two hosts: lp_pipe's direct backend beside gloo, in bytes at the interface and seconds.

    python -m benchmarks.two_hosts [--json FILE] [--rounds N] [--rates 125e6,0]

The hosts are network namespaces with a link of 1 Gbit/s in both directions, or one without a limit (root). direct is
encrypted (TLS 1.3), gloo is not. "sent" is what a host has sent, with headers, by the bytes of the tensor. The methods
of a round alternate, so that a busy machine slows both. "exact": the sum is that in rank order, to the bit.
"""

import argparse
import base64
import contextlib
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import namespaces
from benchmarks.namespaces import Host, answers_of, started_party, tell
from benchmarks.report import machine, show_table, spread, write_json
from lp_pipe.channels import ChannelHub
from lp_pipe.collectives.direct import joined_by_channels
from lp_pipe.connections.credentials import Credentials, generate_credentials, use_credentials
from lp_pipe.membership import Membership

METHODS = ("direct", "gloo")
SIZES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
_PORT = 7000


def _tensor(rank: int, size: str) -> Tensor:
    return torch.randn(SIZES[size] // 4, generator=torch.Generator().manual_seed(rank))


def party() -> None:
    """Sum as often as asked for on stdin, by the method and size that are named there; print the seconds."""
    torch.set_num_threads(1)
    job = json.loads(sys.stdin.readline())
    use_credentials(Credentials.from_bytes(base64.b64decode(job["credentials"])))
    rank, endpoints = job["rank"], [f"tls:{address}:{_PORT}" for address in job["addresses"]]
    names = tuple(f"hosts/{number}" for number in range(len(endpoints)))
    hub = ChannelHub(endpoints[rank], names[rank])
    print("ready", flush=True)
    sys.stdin.readline()
    dist.init_process_group("gloo", f"tcp://{job['addresses'][0]}:{_PORT + 1}", rank=rank, world_size=len(names))
    direct = joined_by_channels(Membership("hosts", 0, rank, names, ()), hub, endpoints)
    sums: dict[str, Callable[[Tensor], Any]] = {"direct": direct.all_reduce, "gloo": dist.all_reduce}
    for line in sys.stdin:
        method, size = line.strip().split("/")
        tensor = _tensor(rank, size)
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        sums[method](tensor)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        expected = _tensor(0, size)
        for other in range(1, len(names)):
            expected += _tensor(other, size)
        print(json.dumps([seconds, cpu_s, torch.equal(tensor, expected)]), flush=True)


def measure(hosts: Sequence[Host], rounds: int) -> dict[str, Any]:
    """Return by size and method: seconds, bytes by those of the tensor, and whether all sums were exact."""
    shared = {
        "credentials": base64.b64encode(generate_credentials().to_bytes()).decode(),
        "addresses": [host.address for host in hosts],
    }
    found: dict[str, Any] = {
        f"{m}/{size}": {"s": [], "cpu_s": [], "sent": [], "exact": True} for size in SIZES for m in METHODS
    }
    with contextlib.ExitStack() as stack:
        parties = [
            stack.enter_context(started_party(host, "benchmarks.two_hosts", {**shared, "rank": rank}))
            for rank, host in enumerate(hosts)
        ]
        answers_of(parties)
        tell(parties, "connect")
        for turn in range(rounds + 1):
            for name, figures in found.items():
                before = [host.sent_bytes() for host in hosts]
                tell(parties, name)
                answers = [json.loads(answer) for answer in answers_of(parties)]
                sent = [host.sent_bytes() - one for host, one in zip(hosts, before, strict=True)]
                if turn:  # the first one has warmed up
                    figures["s"].append(max(seconds for seconds, _, _ in answers))
                    figures["cpu_s"].append(max(cpu_s for _, cpu_s, _ in answers))
                    figures["sent"].append(max(sent) / SIZES[name.split("/")[1]])
                    figures["exact"] &= all(is_exact for _, _, is_exact in answers)
    kinds = ("s", "cpu_s", "sent")
    return {name: {**{kind: spread(one[kind]) for kind in kinds}, "exact": one["exact"]} for name, one in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rates", default="125e6,0", help="bytes per second of the link; 0: without a limit")
    parser.add_argument("--party", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.party:
        party()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # namespaces do not go by themselves
    figures: dict[str, Any] = {"machine": machine()}
    problem = namespaces.why_not()
    if problem:
        print(f"Two hosts: skipped: {problem}")
        return
    load = os.getloadavg()[0]
    rows = []
    for rate in map(float, options.rates.split(",")):
        link = f"{rate * 8e-9:g} Gbit/s" if rate else "no limit"
        with namespaces.two_hosts() as hosts:
            for host in hosts:
                host.limit(rate or None)
            found = figures[link] = measure(hosts, options.rounds)
        for size in SIZES:
            direct, gloo = (found[f"{method}/{size}"] for method in METHODS)
            rows.append(
                [
                    f"{size}, {link}",
                    *(f"{one['sent']['median']:.4f}" for one in (direct, gloo)),
                    *(f"{1e3 * one['s']['median']:.2f}" for one in (direct, gloo)),
                    *(f"{1e3 * one['cpu_s']['median']:.2f}" for one in (direct, gloo)),
                    f"{direct['s']['median'] / gloo['s']['median']:.2f}",
                    f"{direct['s']['min'] / gloo['s']['min']:.2f}",
                    "yes" if direct["exact"] else "no",
                ]
            )
    columns = [
        "",
        "direct sent",
        "gloo sent",
        "direct ms",
        "gloo ms",
        "direct CPU ms",
        "gloo CPU ms",
        "ratio",
        "of the best",
        "exact",
    ]
    show_table("a sum between two hosts", columns, rows)
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores")
    write_json({"benchmark": "two_hosts", "figures": figures}, options.json)


if __name__ == "__main__":
    main()
