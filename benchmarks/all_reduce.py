"""Measure the sum of a tensor over processes of one host: lp_pipe's shared memory beside torch's gloo.

    python -m benchmarks.all_reduce [--json FILE] [--repeats N] [--ranks 2,4]

"in place" adds up tensors in the group's memory, where data-parallel gradients live; "copied" any other tensor. "floor"
is the same additions without waiting for other ranks. The rounds of all methods alternate, so that a busy machine slows
all of them.
"""

import argparse
import multiprocessing
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import machine, show_table, spread, write_json
from lp_pipe.collectives.shm import OwnRankFile, ShmBackend, opened_rank_file
from lp_pipe.membership import Membership

SIZES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "64 MiB": 1 << 26}
_REDUCTIONS = {1 << 16: 200, 1 << 20: 50, 1 << 24: 6, 1 << 26: 2}  # in a round
METHODS = ("gloo", "in place", "copied", "floor")
Times = dict[str, dict[str, list[float]]]  # seconds of a reduction in each round, by size and method


class FloorBackend(ShmBackend):
    """Adds up without waiting."""

    def _arrive(self, call: object, shown: int | None) -> Sequence[int]:
        return [shown or 0] * self.world_size


def rank_process(rank: int, count: int, folder: str, repeats: int, results: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=count)
    membership = Membership("ranks", 0, rank, tuple(str(other) for other in range(count)), ())
    own = OwnRankFile()
    announced: list[bytes] = [b""] * count
    dist.all_gather_object(announced, own.announced)
    files = [own if other == rank else opened_rank_file(one) for other, one in enumerate(announced)]
    backend, floor = ShmBackend(membership, files), FloorBackend(membership, files)
    times: Times = {name: {method: [] for method in METHODS} for name in SIZES}
    for name, size in SIZES.items():
        shared, plain = backend.empty(size // 4, torch.float32).zero_(), torch.zeros(size // 4)
        backend.all_reduce(shared)  # all ranks have mapped it
        reductions: dict[str, Callable[[], object]] = {
            "gloo": lambda plain=plain: dist.all_reduce(plain),
            "in place": lambda shared=shared: backend.all_reduce(shared),
            "copied": lambda plain=plain: backend.all_reduce(plain),
            "floor": lambda shared=shared: floor.all_reduce(shared),
        }
        for turn in range(repeats + 1):
            for method, reduce in reductions.items():
                backend.barrier()
                started = time.perf_counter()
                for _ in range(_REDUCTIONS[size]):
                    reduce()
                if turn:  # the first round maps memory
                    times[name][method].append((time.perf_counter() - started) / _REDUCTIONS[size])
    backend.barrier()
    results.send(times)
    dist.destroy_process_group()


def measure(count: int, repeats: int) -> Times:
    """Return the times of rank 0."""
    times: Times = of_rank_0(rank_process, count, repeats)
    return times


def of_rank_0(run: Callable[..., None], count: int, *arguments: Any) -> Any:
    """Run so many ranks as processes; return what rank 0 has sent.

    run: takes its rank, the count, a folder of all ranks, the arguments, and the connection for its result.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(count)]
        processes = [
            context.Process(target=run, args=(rank, count, folder, *arguments, pipes[rank][1])) for rank in range(count)
        ]
        for process in processes:
            process.start()
        found = [pipe.recv() for pipe, _ in pipes]
        for process in processes:
            process.join()
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ranks", default="2,4")
    options = parser.parse_args()
    figures: dict[str, object] = {"machine": machine()}
    for count in map(int, options.ranks.split(",")):
        times = measure(count, options.repeats)
        figures[f"{count} ranks"] = {
            name: {method: spread(values) for method, values in by_method.items()} for name, by_method in times.items()
        }
        show_table(
            f"all-reduce among {count} processes, median microseconds",
            ["size", *METHODS, "gloo / in place", "gloo / copied", "in place / floor"],
            [_row(name, {method: statistics.median(v) for method, v in of.items()}) for name, of in times.items()],
        )
    write_json(figures, options.json)


def _row(name: str, medians: dict[str, float]) -> list[str]:
    ratios = [("gloo", "in place"), ("gloo", "copied"), ("in place", "floor")]
    return [
        name,
        *(f"{medians[method] * 1e6:.0f}" for method in METHODS),
        *(f"{medians[over] / medians[under]:.2f}" for over, under in ratios),
    ]


if __name__ == "__main__":
    main()
