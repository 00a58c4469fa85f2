"""Two stages on one GPU: how fast CUDA tensors get from one to the other, and what a GPT trains at.

    python -m benchmarks.gpu [--repeats 7] [--quick] [--only steps] [--json FILE]

`make gpu-check` runs it after the exactness tests. Channels come first, alone (benchmarks.gpu_channel), then pipelines,
whose tensors pass by CUDA IPC or by NCCL. The table of throughput compares a pipeline of two stages, which share the
GPU, with plain torch in one process, in bfloat16; it computes the same micro-batches, so that 1.0 would be the limit.
"""

import argparse
import contextlib
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from benchmarks import gpu_channel
from benchmarks.pipeline import Feeder
from benchmarks.report import machine, show_table, spread, write_json
from benchmarks.workloads import Workload, gpt, loss

MODEL = gpt(width=1024, batch_size=64, context=512, depth=12)
QUICK_MODEL = gpt(width=128, batch_size=8, context=64, depth=2)
MICROBATCHES = 8
SIZES = gpu_channel.SIZES
CHANNELS = ("auto", "nccl", "grpc")  # CUDA IPC, NCCL, by the host


class Pass(nn.Module):
    """Hands on what it gets; a parameter, so that there is something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.flatten()[0]


def sgd(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


@contextlib.contextmanager
def launched(model: pp.Model, workload: Workload | None, run_dir: str, **options: Any) -> Iterator[pp.PipelineClient]:
    program = lp.Program("bench_gpu")
    feeder = program.add_node(lp.CourierNode(Feeder, workload), label="feeder") if workload else None
    handle = pp.add_pipeline(program, model, stages=2, device="cuda:0", inputs=feeder, **options)
    with lp.launch(program, "process", run_dir=run_dir) as run:
        yield run.client(handle)


def evaluations_s(channel: str, repeats: int, run_dir: str) -> dict[str, list[float]]:
    """Seconds of an evaluation of two empty stages, by the size of the tensor that passes from one to the other."""
    found: dict[str, list[float]] = {}
    with launched(pp.Model([Pass(), Pass()], mean, sgd), None, run_dir, channel=channel) as two:
        for name, size in SIZES.items():
            x = torch.zeros(8, size // 32)  # 8 micro-batches' worth in one input
            times = []
            for _ in range(repeats + 1):
                start = time.perf_counter()
                two.evaluate([(x, torch.zeros(8))])
                times.append(time.perf_counter() - start)
            found[name] = times[1:]
    return found


def pipeline_step_s(workload: Workload, schedule: str, repeats: int, run_dir: str) -> list[float]:
    options: dict[str, Any] = {"schedule": schedule, "microbatches": MICROBATCHES, "precision": "bf16"}
    with launched(workload.model(), workload, run_dir, **options) as pipeline:
        list(pipeline.steps(2))
        return [result.seconds for result in pipeline.steps(repeats)]


def torch_step_s(workload: Workload, repeats: int) -> list[float]:
    """The plain loop over the same micro-batches, in this process."""
    model = workload.layers().cuda()
    optimizer = workload.optimizer(list(model.named_parameters()))
    found = []
    for step in range(repeats + 2):
        start = time.perf_counter()
        inputs, targets = (part.cuda().chunk(MICROBATCHES) for part in workload.batch(step))
        for x, y in zip(inputs, targets, strict=True):
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                value = loss(model(x), y)
            (value / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return found[2:]


def evaluations(workload: Workload, repeats: int, run_dir: str) -> dict[str, Any]:
    found = {
        f"{name}, {channel}": spread(times)
        for channel in CHANNELS
        for name, times in evaluations_s(channel, repeats, run_dir).items()
    }
    show_table(
        "An evaluation of two empty stages on one GPU, with a tensor of this size",
        ["size, channel", "median ms"],
        [[name, f"{one['median'] * 1e3:.2f}"] for name, one in found.items()],
    )
    return found


def steps(workload: Workload, repeats: int, run_dir: str) -> dict[str, Any]:
    found = {"torch, one process": spread(torch_step_s(workload, repeats))}
    for schedule in ("gpipe", "1f1b", "zb_h1"):
        found[schedule] = spread(pipeline_step_s(workload, schedule, repeats, run_dir))
    tokens = workload.batch(0)[0].numel()
    base = statistics.median(found["torch, one process"]["values"])
    show_table(
        f"GPT, bf16, {tokens} tokens a step",
        ["party", "median ms", "tokens/s", "of torch"],
        [
            [name, f"{one['median'] * 1e3:.1f}", f"{tokens / one['median']:.0f}", f"{base / one['median']:.2f}"]
            for name, one in found.items()
        ],
    )
    return found


def channels(workload: Workload, repeats: int, run_dir: str) -> dict[str, Any]:
    return gpu_channel.run(repeats)


PARTS = {"channels": channels, "evaluations": evaluations, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--only", choices=PARTS, help="one of the three parts")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: torch sees no GPU here")
    torch.set_num_threads(1)  # as in nodes
    workload = QUICK_MODEL if options.quick else MODEL
    figures: dict[str, Any] = {"machine": machine(), "device": torch.cuda.get_device_name(0)}
    with tempfile.TemporaryDirectory() as run_dir:
        for name in [options.only] if options.only else PARTS:
            figures[f"{name}_s"] = PARTS[name](workload, options.repeats, run_dir)
    write_json(figures, options.json)


if __name__ == "__main__":
    main()
