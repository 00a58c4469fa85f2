"""Measure the time of tensors from one process to another: channels of each kind, torch's gloo alone, a memcpy.

    python -m benchmarks.channel [--json FILE] [--repeats N] [--pin]

One way = half a round trip: each process sends back what it has received, so every byte is written and read once per
way, by whichever means. The rounds of all methods alternate, so that a busy machine slows all of them.
"torch gloo" is torch.distributed's send and recv; "gloo" is a channel over it.
"""

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from lp_pipe.channels import ChannelHub, Receiver, Sender, kinds, open_sender

SIZES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "64 MiB": 1 << 26}
CHANNELS = ("shm", "gloo", "grpc")
METHODS = ("memcpy", *CHANNELS, "torch gloo")
_TIMEOUT_S = 60.0
_ROUND_TRIPS = {1 << 16: 200, 1 << 20: 100, 1 << 26: 4}


class Peer:
    """A process of the two; both run the same program, and the second one answers."""

    def __init__(self, directory: str, rank: int) -> None:
        self.rank = rank
        self._directory = directory
        usual = f"unix:{directory}/{rank}"
        self._hubs = {
            kind: ChannelHub(kinds.named(kind).hub_endpoint(f"{usual}-{kind}"), f"peer/{rank}") for kind in CHANNELS
        }
        self._receivers = {kind: hub.receiver(kind) for kind, hub in self._hubs.items()}
        self._senders: dict[str, Sender] = {}

    def connect(self) -> None:
        """Connect to the other process's hubs, which listen once gloo's rendezvous is over."""
        dist.init_process_group("gloo", f"file://{self._directory}/store", rank=self.rank, world_size=2)
        endpoints: list[dict[str, str]] = [{}, {}]
        dist.all_gather_object(endpoints, {kind: hub.endpoint for kind, hub in self._hubs.items()})
        for kind, endpoint in endpoints[1 - self.rank].items():
            self._senders[kind] = open_sender(endpoint, kind, kind=kind, name=f"peer/{self.rank}")

    def trip(self, method: str, tensor: torch.Tensor) -> Callable[[], None]:
        if method == "torch gloo":
            return lambda: self._gloo_trip(tensor)
        sender, receiver = self._senders[method], self._receivers[method]
        return lambda: self._channel_trip(sender, receiver, tensor)

    def _gloo_trip(self, tensor: torch.Tensor) -> None:
        for turn in (0, 1):
            if turn == self.rank:
                dist.send(tensor, 1 - self.rank)
            else:
                dist.recv(tensor, 1 - self.rank)

    def _channel_trip(self, sender: Sender, receiver: Receiver, tensor: torch.Tensor) -> None:
        value = tensor
        for turn in (0, 1):
            if turn == self.rank:
                sender.send(0, value)
            else:
                value = receiver.receive(0, _TIMEOUT_S)

    def close(self) -> None:
        dist.barrier()  # whoever closes first ends the other's channels
        dist.destroy_process_group()
        for hub in self._hubs.values():
            hub.close("the benchmark is over")


def memcpy(tensor: torch.Tensor) -> Callable[[], None]:
    """Two copies, so that half of it is one, as for the round trips."""
    target = torch.empty_like(tensor)
    size = tensor.nbytes

    def copy_twice() -> None:
        ctypes.memmove(target.data_ptr(), tensor.data_ptr(), size)
        ctypes.memmove(tensor.data_ptr(), target.data_ptr(), size)

    return copy_twice


def one_way_s(trip: Callable[[], None], count: int) -> float:
    trip()  # warm
    begin = time.perf_counter()
    for _ in range(count):
        trip()
    return (time.perf_counter() - begin) / count / 2


def measure(peer: Peer, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds one way: size -> method -> one entry per repeat."""
    times: dict[str, dict[str, list[float]]] = {size: {method: [] for method in METHODS} for size in SIZES}
    for name, size in SIZES.items():
        tensor = torch.ones(size // 4)
        for _ in range(repeats):
            for method in METHODS:
                # The other process waits in the next method's receive, and leaves the machine to the memcpy.
                if method == "memcpy" and peer.rank == 0:
                    times[name][method].append(one_way_s(memcpy(tensor), _ROUND_TRIPS[size]))
                elif method != "memcpy":
                    times[name][method].append(one_way_s(peer.trip(method, tensor), _ROUND_TRIPS[size]))
    return times


def report(times: dict[str, dict[str, list[float]]]) -> dict[str, object]:
    """Print the table; returns what goes into the JSON."""
    medians = {
        size: {method: statistics.median(values) for method, values in row.items()} for size, row in times.items()
    }
    lines = ["| one way, median | " + " | ".join(SIZES) + " |", "|---|" + "--:|" * len(SIZES)]
    for method in METHODS:
        cells = [f"{_duration(row[method])} ({row[method] / row['memcpy']:.1f}x)" for row in medians.values()]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    sys.stdout.write("\n".join(lines) + "\n")
    spread = {size: {method: [min(v), max(v)] for method, v in row.items()} for size, row in times.items()}
    machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "torch": torch.__version__}
    return {"unit": "s", "machine": machine, "median": medians, "min_max": spread}


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


@contextlib.contextmanager
def second_process(directory: str, repeats: int, is_pinned: bool) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.channel", "--repeats", str(repeats), "--answer-in", directory]
    process = subprocess.Popen([*command, "--pin"] if is_pinned else command)
    try:
        yield
        process.wait(_TIMEOUT_S)
    finally:
        process.kill()
        process.wait()


def run(directory: str, rank: int, repeats: int, is_pinned: bool) -> dict[str, dict[str, list[float]]]:
    torch.set_num_threads(1)
    if is_pinned:
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    peer = Peer(directory, rank)
    peer.connect()
    try:
        return measure(peer, repeats)
    finally:
        peer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--pin", action="store_true", help="give each process one core, as stages have; slows gloo")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    parser.add_argument("--answer-in", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer_in is not None:
        run(options.answer_in, 1, options.repeats, options.pin)
        return
    directory = tempfile.mkdtemp(prefix="lp")
    try:
        with second_process(directory, options.repeats, options.pin):
            figures = report(run(directory, 0, options.repeats, options.pin))
    finally:
        shutil.rmtree(directory)
    text = json.dumps(figures)
    sys.stdout.write(text + "\n")
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
