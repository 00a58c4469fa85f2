"""Measure what ZeRO costs in memory and in time, beside torch's ZeroRedundancyOptimizer and FSDP2 over gloo.

    python -m benchmarks.zero [--json FILE] [--repeats N] [--steps N] [--ranks 2,4]

Bytes per parameter are those of fp32 Adam in one process: the proportional set size (PSS) above that of the same
program with a tiny model, when the optimizer has made its update, and at the end of the backward. Their bar is theory
and 5 %, activations and a layer's temporaries included. The bar of a step is a ratio of times, ours to torch's: below 1
is faster. At the end a model trains with zero=3 that does not fit a process's RLIMIT_DATA with zero=0.
"""

import argparse
import os
import pathlib
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import lp_pipe as lp
import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp
from benchmarks.all_reduce import of_rank_0
from benchmarks.report import machine, show_table, spread, write_json

_WARM_UP = 2  # steps
_LAYERS = 32
_WIDTH = 512
_MEMORY_WIDTH = 1024  # buffers of a fixed size are a small part then
_EXPECTED: dict[int, Callable[[int], float]] = {
    0: lambda n: 16.0,
    1: lambda n: 8 + 8 / n,
    2: lambda n: 4 + 12 / n,
    3: lambda n: 16 / n,
}
_MEMORY_BAR = 1.05  # of the theory
_STEP_BARS = {1: 0.8, 2: 0.8, 3: 1.0}  # of torch's seconds, by zero


def pss_bytes() -> int:
    """Return the memory of this process, of shared pages its share."""
    for line in pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the kernel tells no proportional set size")


class Probe(nn.Module):
    """Notes the process's memory in the backward; without parameters, of which a user's layer would have copies."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda _: note(self.folder, "backward"))
        return x


def note(folder: str, when: str) -> None:
    """Write the largest memory of this process at such a moment to the folder."""
    path = pathlib.Path(folder, f"{when}-{os.getpid()}")
    known = int(path.read_text()) if path.exists() else 0
    path.write_text(str(max(known, pss_bytes())))


def build(width: int, folder: str | None = None) -> nn.Sequential:
    torch.set_num_threads(1)
    layers: list[nn.Module] = [nn.Linear(width, width, bias=False) for _ in range(_LAYERS)]
    if folder is not None:
        layers.insert(1, Probe(folder))
    return nn.Sequential(*layers)


def batch(width: int, ranks: int) -> tuple[Tensor, Tensor]:
    return torch.ones(4 * ranks, width), torch.zeros(4 * ranks, width)


def adam(parameters: Any, folder: str | None = None) -> torch.optim.Optimizer:
    made = torch.optim.Adam(parameters, 1e-4)
    if folder is not None:
        made.register_step_post_hook(lambda *_: note(folder, "update"))
    return made


def replica_loop(replica: dp.Replica, zero: int, width: int, steps: int, folder: str, *, is_probed: bool) -> None:
    with torch.device("meta" if zero >= 2 else "cpu"):
        model: nn.Module = build(width, folder if is_probed else None)
    if zero >= 2:
        model = replica.shard(model, zero)
    inner = adam(model.parameters(), folder if is_probed else None)
    optimizer = replica.optimizer(inner, model, zero=zero if zero < 2 else 0)
    data = batch(width, replica.num_replicas)
    started = 0.0
    for step in replica.steps(_WARM_UP + steps):
        if step == _WARM_UP:
            started = time.perf_counter()
        for x, y, weight in replica.shards(data):
            (nn.functional.mse_loss(model(x), y) * weight).backward()
        optimizer.step()
    if replica.rank == 0:
        torch.save((time.perf_counter() - started) / steps, pathlib.Path(folder) / "seconds.pt")


def pipeline_trainer(pipeline: Any, width: int, ranks: int, steps: int) -> None:
    for _ in range(_WARM_UP + steps):
        pipeline.step(batch(width, ranks))
    lp.stop()


def pipeline_program(zero: int, ranks: int, width: int, steps: int, folder: str) -> lp.Program:
    layers = [pp.Layer(nn.Linear, width, width, bias=False) for _ in range(_LAYERS)]
    layers.insert(1, pp.Layer(Probe, folder))
    model = pp.Model(layers, nn.functional.mse_loss, partial(adam, folder=folder))
    program = lp.Program("zero")
    pipeline = pp.add_pipeline(program, model, stages=1, replicas=ranks, microbatches=ranks, zero=zero)
    program.add_node(lp.PyNode(pipeline_trainer, pipeline, width, ranks, steps), label="trainer")
    return program


def memory_of(kind: str, zero: int, ranks: int, width: int, steps: int = 2) -> dict[str, float]:
    """Return the memory of the largest process at each moment, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == "pipeline":
            program = pipeline_program(zero, ranks, width, steps, folder)
        else:
            program = lp.Program("zero")
            dp.add_replicas(program, replica_loop, zero, width, steps, folder, replicas=ranks, is_probed=True)
        lp.launch(program, mode="process", run_dir=pathlib.Path(folder) / "run").wait()
        found: dict[str, float] = {}
        for when in ("update", "backward"):
            found[when] = max(int(path.read_text()) for path in pathlib.Path(folder).glob(f"{when}-*"))
        return found


def bytes_per_parameter(kind: str, zero: int, ranks: int) -> dict[str, float]:
    whole, tiny = memory_of(kind, zero, ranks, _MEMORY_WIDTH), memory_of(kind, zero, ranks, 8)
    count = _LAYERS * _MEMORY_WIDTH**2
    return {when: (whole[when] - tiny[when]) / count for when in whole}


def seconds_of_replicas(zero: int, ranks: int, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        program = lp.Program("zero")
        dp.add_replicas(program, replica_loop, zero, _WIDTH, steps, folder, replicas=ranks, is_probed=False)
        lp.launch(program, mode="process", run_dir=pathlib.Path(folder) / "run").wait()
        return float(torch.load(pathlib.Path(folder) / "seconds.pt"))


def torch_loop(rank: int, count: int, folder: str, zero: int, steps: int, results: Connection) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=count)
    model: nn.Module = build(_WIDTH)
    optimizer: torch.optim.Optimizer
    if zero == 1:
        model = nn.parallel.DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-4)
    else:
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        for part in (*model, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=zero == 3)
        optimizer = adam(model.parameters())
    x, y = batch(_WIDTH, 1)
    started = 0.0
    for step in range(_WARM_UP + steps):
        if step == _WARM_UP:
            started = time.perf_counter()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    results.send((time.perf_counter() - started) / steps)
    dist.destroy_process_group()


def seconds_of_torch(zero: int, ranks: int, steps: int) -> float:
    return float(of_rank_0(torch_loop, ranks, zero, steps))


def limited(replica: dp.Replica, zero: int) -> None:
    """Train with room for 10 bytes per parameter more than this process has already."""
    used = next(line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    limit = (int(used.split()[1]) << 10) + 10 * _LAYERS * _MEMORY_WIDTH**2
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    with tempfile.TemporaryDirectory() as folder:
        replica_loop(replica, zero, _MEMORY_WIDTH, 2, folder, is_probed=False)


def trains_within_the_limit(zero: int) -> str:
    """Return "trains", or the first line of the error that names what to do."""
    with tempfile.TemporaryDirectory() as folder:
        program = lp.Program("limited")
        dp.add_replicas(program, limited, zero, replicas=4)
        try:
            lp.launch(program, mode="process", run_dir=pathlib.Path(folder) / "run").wait()
        except lp.NodeError as error:
            advice = [line for line in str(error).splitlines() if "out of memory" in line and "zero=" in line]
            return advice[0] if advice else f"names no zero=: {error}"
        return "trains"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ranks", default="2,4")
    options = parser.parse_args()
    all_ranks = [int(one) for one in options.ranks.split(",")]
    figures: dict[str, Any] = {"machine": machine()}
    rows = []
    for ranks in all_ranks:
        for kind, zeros in (("pipeline", (0, 1, 2, 3)), ("replicas", (0, 1, 2, 3))):
            for zero in zeros:
                found = bytes_per_parameter(kind, zero, ranks)
                figures[f"{kind}, zero={zero}, {ranks} ranks, bytes per parameter"] = found
                wanted = _EXPECTED[zero](ranks)
                numbers = [wanted, wanted * _MEMORY_BAR, *found.values()]
                rows.append([kind, str(ranks), str(zero), *(f"{number:.2f}" for number in numbers)])
    columns = ["", "ranks", "zero", "theory", "bar", "update", "backward"]
    show_table("Bytes per parameter of a process", columns, rows)
    rows = []
    for ranks in all_ranks:
        for zero in (1, 2, 3):
            ours, others = [], []
            for _ in range(options.repeats):
                ours.append(seconds_of_replicas(zero, ranks, options.steps))
                others.append(seconds_of_torch(zero, ranks, options.steps))
            ratio = spread(ours)["median"] / spread(others)["median"]
            figures[f"zero={zero}, {ranks} ranks, seconds"] = {"lp_pipe": spread(ours), "torch": spread(others)}
            times = [f"{1e3 * spread(values)['median']:.0f}" for values in (ours, others)]
            rows.append([str(ranks), str(zero), *times, f"{ratio:.2f}", f"{_STEP_BARS[zero]:.1f}"])
    columns = ["ranks", "zero", "lp_pipe", "torch over gloo", "our time / torch's", "bar"]
    show_table("A step, in ms", columns, rows)
    rows = [[str(zero), trains_within_the_limit(zero)] for zero in (0, 3)]
    show_table("4 workers with room for 10 bytes per parameter", ["zero", "outcome"], rows)
    write_json(figures, options.json)


if __name__ == "__main__":
    main()
