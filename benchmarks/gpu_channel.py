"""Measure the time of CUDA tensors between two processes on one GPU: CUDA IPC, NCCL, and the host's memory.

    python -m benchmarks.gpu_channel [--repeats 7]

benchmarks.gpu prints this table, too. One way = half a round trip, as in benchmarks.channel; the rounds of all methods
alternate. "copy on the GPU" is what nothing can beat. Two processes on one GPU pass for two hosts to NCCL, which then
goes through the network's loopback: its figure here says that it works, not how fast it is between two GPUs.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.report import show_table, spread
from lp_pipe.channels import ChannelHub, Receiver, Sender, open_sender

SIZES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "64 MiB": 1 << 26}
DEVICE, HOST = torch.device("cuda:0"), torch.device("cpu")
METHODS = {"CUDA IPC": ("auto", DEVICE), "NCCL": ("nccl", DEVICE), "by the host": ("auto", HOST)}
_COPY = "copy on the GPU"
_TRIPS = {1 << 16: 100, 1 << 20: 50, 1 << 26: 10}
_TIMEOUT_S = 120.0


class Peer:
    """A process of the two; the second one sends back what it receives."""

    def __init__(self, directory: str, rank: int) -> None:
        self._hub = ChannelHub(f"unix:{directory}/{rank}", f"peer/{rank}")
        self.endpoint = self._hub.endpoint
        self._receivers = {name: self._hub.receiver(name, device=device) for name, (_, device) in METHODS.items()}
        self._senders: dict[str, Sender] = {}

    def connect(self, endpoint: str) -> None:
        for name, (kind, device) in METHODS.items():
            self._senders[name] = open_sender(endpoint, name, kind=kind, device=device)

    def trip(self, method: str, x: torch.Tensor) -> None:
        self._send(method, x)
        self._receive(self._receivers[method])

    def answer(self, method: str) -> None:
        self._send(method, self._receive(self._receivers[method]))

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close("the benchmark is over")
        self._hub.close("the benchmark is over")

    def _send(self, method: str, x: torch.Tensor) -> None:
        self._senders[method].send(0, x.to(METHODS[method][1]))

    def _receive(self, receiver: Receiver) -> torch.Tensor:
        value: torch.Tensor = receiver.receive(0, _TIMEOUT_S)
        return value.to(DEVICE)


def one_way_s(trip: Callable[[], None], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        trip()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count / 2


def copy_twice(x: torch.Tensor) -> None:
    x.clone().clone()


def measure(peer: Peer, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds one way: size -> method -> one entry per repeat; the first round of each is to warm up."""
    times: dict[str, dict[str, list[float]]] = {}
    for name, size in SIZES.items():
        x = torch.ones(size // 4, device=DEVICE)
        trips: dict[str, Callable[[], None]] = {_COPY: lambda x=x: copy_twice(x)}  # type: ignore[misc]
        trips |= {method: lambda x=x, method=method: peer.trip(method, x) for method in METHODS}  # type: ignore[misc]
        rounds = [{method: one_way_s(trip, _TRIPS[size]) for method, trip in trips.items()} for _ in range(repeats + 1)]
        times[name] = {method: [found[method] for found in rounds[1:]] for method in trips}
    return times


def answer(directory: str, endpoint: str, repeats: int) -> None:
    """The second process: the same trips in the same order."""
    peer = Peer(directory, 1)
    sys.stdout.write(json.dumps(peer.endpoint) + "\n")
    sys.stdout.flush()
    peer.connect(endpoint)
    for size in SIZES.values():
        for _ in range(repeats + 1):
            for method in METHODS:
                for _ in range(_TRIPS[size]):
                    peer.answer(method)
    peer.close()


@contextlib.contextmanager
def second_process(directory: str, endpoint: str, repeats: int) -> Iterator[str]:
    """Start the second process and yield its endpoint."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_channel",
        "--repeats",
        str(repeats),
        "--answer",
        directory,
        endpoint,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
        process.wait(_TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()


def run(repeats: int) -> dict[str, dict[str, dict[str, object]]]:
    """Print the table; returns what goes into a JSON."""
    with tempfile.TemporaryDirectory(prefix="lp") as directory:
        peer = Peer(directory, 0)
        with second_process(directory, peer.endpoint, repeats) as endpoint:
            peer.connect(endpoint)
            times = measure(peer, repeats)
            peer.close()
    spreads = {size: {method: spread(values) for method, values in row.items()} for size, row in times.items()}
    show_table(
        "CUDA tensors from one process to another on one GPU, one way",
        ["size", "by", "median ms", "GB/s"],
        [
            [size, method, f"{found['median'] * 1e3:.3f}", f"{SIZES[size] / found['median'] / 1e9:.2f}"]
            for size, row in spreads.items()
            for method, found in row.items()
        ],
    )
    return spreads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--answer", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu_channel: torch sees no GPU here")
    torch.set_num_threads(1)  # as in nodes
    if options.answer is not None:
        directory, endpoint = options.answer
        answer(directory, endpoint, options.repeats)
    else:
        run(options.repeats)


if __name__ == "__main__":
    main()
