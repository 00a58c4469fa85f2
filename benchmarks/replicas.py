"""Measure what data parallelism leaves of a training's step rate: lp_pipe's replicas beside torch's DDP over gloo.

    python -m benchmarks.replicas [--json FILE] [--repeats N] [--steps N] [--workers 2,4,8]

The backward of each layer sleeps instead of computing, so that the workers need no cores of their own. "kept" is the
time of a step of the plain loop by that of a step with so many workers, each of which has the plain loop's work.
"exchanges" are those of gradients in a step.
"""

import argparse
import pathlib
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from benchmarks.all_reduce import of_rank_0
from benchmarks.report import machine, show_table, spread, write_json

_WARM_UP = 3  # steps
_METHODS = ("plain", "ddp", "replicas")


class Job(NamedTuple):
    """A model. numel: of each layer's parameter, in float32. seconds: of its backward."""

    layers: int
    numel: int
    seconds: float


JOBS = {"4 MB in 30 ms": Job(20, 50_000, 1.5e-3), "25 MB in 100 ms": Job(20, 312_500, 5e-3)}
MANY_PARAMETERS = Job(200, 5_000, 0.0)  # of 20 KB each


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], torch.ones_like(ctx.saved_tensors[0]), None


class Layer(nn.Module):
    """Passes its input on; its backward sleeps."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(job.numel))
        self.seconds = job.seconds

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Sleep.apply(x, self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return found


def build(job: Job) -> nn.Module:
    torch.set_num_threads(1)
    return nn.Sequential(*(Layer(job) for _ in range(job.layers)))


def replica_loop(replica: dp.Replica, job: Job, steps: int, folder: str) -> None:
    model = build(job)
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 1e-3), model)
    batch = torch.ones(replica.num_replicas, 4), torch.ones(replica.num_replicas)
    started = 0.0
    for step in replica.steps(_WARM_UP + steps):
        if step == _WARM_UP:
            started = time.perf_counter()
        for x, _, weight in replica.shards(batch):
            (model(x.requires_grad_()).mean() * weight).backward()
        optimizer.step()
    seconds = (time.perf_counter() - started) / steps
    if replica.rank == 0:
        torch.save((seconds, optimizer.buckets.count), pathlib.Path(folder) / "figures.pt")


def with_replicas(job: Job, workers: int, steps: int) -> float:
    """Return the seconds of a step of rank 0."""
    return replica_figures(job, workers, steps)[0]


def replica_figures(job: Job, workers: int, steps: int) -> tuple[float, int]:
    """Return the seconds of a step of rank 0, and the exchanges of gradients in it."""
    with tempfile.TemporaryDirectory() as folder:
        program = lp.Program("replicas")
        dp.add_replicas(program, replica_loop, job, steps, folder, replicas=workers)
        lp.launch(program, mode="process", run_dir=pathlib.Path(folder) / "run").wait()
        found: tuple[float, int] = torch.load(pathlib.Path(folder) / "figures.pt")
        return found


def torch_loop(rank: int, count: int, folder: str, job: Job, steps: int, is_ddp: bool, results: Connection) -> None:
    model = build(job)
    if is_ddp:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=count)
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    started = 0.0
    for step in range(_WARM_UP + steps):
        if step == _WARM_UP:
            started = time.perf_counter()
        model(torch.ones(1, 4).requires_grad_()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    results.send((time.perf_counter() - started) / steps)
    if is_ddp:
        dist.destroy_process_group()


def with_torch(job: Job, workers: int, steps: int, *, is_ddp: bool) -> float:
    """Return the seconds of a step of rank 0."""
    return float(of_rank_0(torch_loop, workers, job, steps, is_ddp))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", default="2,4,8")
    options = parser.parse_args()
    figures: dict[str, Any] = {"machine": machine()}
    rows = []
    for name, job in JOBS.items():
        for workers in map(int, options.workers.split(",")):
            methods: dict[str, Callable[[], float]] = {
                "plain": partial(with_torch, job, 1, options.steps, is_ddp=False),
                "ddp": partial(with_torch, job, workers, options.steps, is_ddp=True),
                "replicas": partial(with_replicas, job, workers, options.steps),
            }
            times: dict[str, list[float]] = {method: [] for method in _METHODS}
            for _ in range(options.repeats):
                for method, measure in methods.items():
                    times[method].append(measure())
            found = {method: spread(values) for method, values in times.items()}
            kept = {method: found["plain"]["median"] / found[method]["median"] for method in _METHODS[1:]}
            figures[f"{name}, {workers} workers"] = {"step_s": found, "kept": kept}
            rows.append(
                [
                    name,
                    str(workers),
                    *(f"{found[method]['median'] * 1e3:.1f}" for method in _METHODS),
                    *(f"{share:.3f}" for share in kept.values()),
                ]
            )
    columns = ["gradients", "workers", *(f"{method} ms" for method in _METHODS), "ddp kept", "replicas kept"]
    show_table("sleeping compute: a step, and the share of the plain loop's step rate", columns, rows)
    exchanges = figures["exchanges of 200 parameters of 20 KB"] = replica_figures(MANY_PARAMETERS, 2, 3)[1]
    print(f"exchanges per step with 200 parameters of 20 KB: {exchanges}")
    write_json(figures, options.json)


if __name__ == "__main__":
    main()
