"""An MLP whose activations do not fit into its stages' memory, and that trains there with recompute.

    lp_pipe launch examples/big_mlp.py --mode=process
    lp_pipe launch examples/big_mlp.py:without_recompute --mode=process      # "can't allocate memory"

Each stage's process limits itself (RLIMIT_DATA, on Linux) to what it has when its weights are there, and BUDGET more.
Of each micro-batch autograd saves 81 MiB on a stage; GPipe lets all eight wait for their backwards. With recompute 1.5
MiB of each wait, and only the one whose backward runs has all 81. Where nodes are threads there is no limit.
"""

import resource
import threading
from pathlib import Path

import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp

BUDGET = 800 * 2**20  # bytes: for activations, gradients, what kernels need, the stacks of threads
FEATURES = 8
WIDTH = 16
BLOCKS = 12
MICROBATCHES = 8
ROWS = 24 * 1024 * MICROBATCHES


class Block(nn.Module):
    """Adds to its input what a hidden layer makes of it; autograd saves 9 times the input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BD: Tensor) -> Tensor:
        y_BD: Tensor = x_BD + self.inner(x_BD) / BLOCKS
        return y_BD


class Feeder:
    """Rows of noise, and the sum of their sines to be learned."""

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(step))
        return x, x.sin().sum(1, keepdim=True)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def limit_memory() -> None:
    """Let this process allocate BUDGET more bytes than it has, and no more."""
    status = Path("/proc/self/status").read_text().split()
    used = int(status[status.index("VmData:") + 1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + BUDGET, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def optimizer(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Called in each stage when its weights are there."""
    if threading.current_thread() is threading.main_thread():  # the node has a process of its own
        limit_memory()
    return torch.optim.SGD(parameters, lr=0.01)


def big_mlp() -> pp.Model:
    blocks = [pp.Layer(Block) for _ in range(BLOCKS)]
    return pp.Model(
        [pp.Layer(nn.Linear, FEATURES, WIDTH), *blocks, pp.Layer(nn.Linear, WIDTH, 1)], squared_error, optimizer
    )


def train(pipeline: pp.PipelineClient, steps: int) -> None:
    for result in pipeline.steps(steps):
        print(f"step {result.step}: loss {result.loss:.4f}", flush=True)
    lp.stop()


def make_program(recompute: str = "full", steps: int = 20) -> lp.Program:
    """Build the feeder, a pipeline of two stages and the trainer."""
    program = lp.Program("big_mlp")
    feeder = program.add_node(lp.CourierNode(Feeder), label="feeder")
    options = {"stages": [1 + BLOCKS // 2], "schedule": "gpipe", "microbatches": MICROBATCHES}
    pipeline = pp.add_pipeline(program, big_mlp(), recompute=recompute, inputs=feeder, **options)
    program.add_node(lp.PyNode(train, pipeline, steps), label="trainer")
    return program


def without_recompute() -> lp.Program:
    """The same, which fails."""
    return make_program(recompute="none")


if __name__ == "__main__":  # so that python examples/big_mlp.py does it, too
    lp.launch(make_program(), mode="process").wait()
