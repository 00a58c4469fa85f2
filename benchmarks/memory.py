"""Measure the memory that stages hold for backwards, beside the schedule's prediction: GPipe's table of recompute.

    python -m benchmarks.memory [--stages 2,4] [--blocks 8] [--quick] [--json FILE]

A stack of equal blocks (Linear, GELU, Linear, added to their input), cut evenly. For every schedule and recompute the
table has the worker with the most activations: the measured peak of `profile_memory`, and the prediction

    the most that a worker's actions hold at a time (a forward adds, a backward, or its W, takes away) of
    bytes that the layers of one micro-batch leave, + the gradients of their outputs from an I to its W,
    + bytes of the segment that runs again

with a block's bytes counted by hand from what autograd saves of it, and from what its weights need. Only GPipe and 1F1B
are run with recompute. An asynchronous schedule keeps older weights besides, as many as its forwards are updates
behind.
Source: GPipe (Huang et al., 2019), table 1.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from benchmarks.report import machine, show_table, write_json

SCHEDULES = tuple(name for name in pp.schedules() if name != "forward")  # which keeps nothing
RECOMPUTED = ("gpipe", "1f1b")
RECOMPUTES: dict[str, Any] = {"none": "none", "every 2": ("every", 2), "full": "full"}
_FACTOR = 4  # a block's inner width to its outer one


class Size(NamedTuple):
    """The sizes of the stack and its data. rows: samples of a micro-batch."""

    blocks: int
    width: int
    rows: int
    microbatches: int

    @property
    def activation_bytes(self) -> int:
        """One micro-batch between two blocks."""
        return self.rows * self.width * 4

    @property
    def block_bytes(self) -> int:
        """What autograd saves of a block: its input, GELU's input and GELU's output."""
        return self.activation_bytes * (1 + 2 * _FACTOR)

    @property
    def deferred_bytes(self) -> int:
        """What the weights of a block need besides: the gradients of its two Linears' outputs."""
        return self.activation_bytes * (1 + _FACTOR)


class Block(nn.Module):
    """[B, D] -> [B, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, _FACTOR * width)
        self.down = nn.Linear(_FACTOR * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return y


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def sgd(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


class Feeder:
    """The same batch in every step."""

    def __init__(self, size: Size) -> None:
        rows = size.rows * size.microbatches
        self._batch = (torch.ones(rows, size.width), torch.ones(rows, 1))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self._batch


def measured(size: Size, stages: int, schedule: str, recompute: Any) -> list[pp.StageMemory]:
    program = lp.Program("bench_memory")
    feeder = program.add_node(lp.CourierNode(Feeder, size), label="feeder")
    each = size.blocks // pp.make_schedule(schedule, stages, size.microbatches).stages
    pipeline = pp.add_pipeline(
        program,
        pp.Model([pp.Layer(Block, size.width) for _ in range(size.blocks)], mean, sgd),
        stages=list(range(each, size.blocks, each)),
        schedule=schedule,
        microbatches=size.microbatches,
        recompute=recompute,
        inputs=feeder,
    )
    with lp.launch(program, "thread") as run:
        client = run.client(pipeline)
        client.step()  # the first one copies what it need not
        return client.profile_memory(1)


def predicted(size: Size, stages: int, schedule: str, recompute: str) -> list[int]:
    """Return each worker's predicted bytes. The first one's inputs are slices of the batch and no activations."""
    order = pp.make_schedule(schedule, stages, size.microbatches)
    each = size.blocks // order.stages
    group = {"none": 0, "every 2": min(2, each), "full": each}[recompute]  # blocks of a segment
    kept = -(-each // group) * size.activation_bytes if group else each * size.block_bytes
    again = group * size.block_bytes - size.activation_bytes if group else 0  # its input is kept already
    return [
        again + _most_held(actions, kept, each * size.deferred_bytes, size, order.stages) for actions in order.workers
    ]


def predicted_versions(size: Size, stages: int, schedule: str) -> list[int]:
    """Copies of each worker's weights, beside the newest."""
    order = pp.make_schedule(schedule, stages, size.microbatches)
    if order.updates is None:
        return [0] * stages
    return [timing.delay for timing in order.updates.timings([1] * stages)]


def _most_held(actions: Sequence[pp.Action], kept: int, deferred: int, size: Size, stages: int) -> int:
    """Bytes. kept: what a forward leaves, on stage 0 without the batch. deferred: what an I leaves besides.

    Stage 0 leaves all of its backward to W. The mean's gradient, the last stage's first one, is one number.
    """
    one = size.activation_bytes
    held = most = 0
    for action in actions:
        left = kept - (one if action.stage == 0 else 0)
        waits = one if action.stage == 0 else deferred - (one - 4 if action.stage == stages - 1 else 0)
        held += {"F": left, "I": waits, "B": -left, "W": -left - waits}[action.op]
        most = max(most, held)
    return most


def figures_of(size: Size, stages: int, schedule: str, recompute: str) -> dict[str, Any]:
    memory = measured(size, stages, schedule, RECOMPUTES[recompute])
    prediction = predicted(size, stages, schedule, recompute)
    versions = predicted_versions(size, stages, schedule)
    largest = max(range(stages), key=lambda worker: memory[worker].activation_bytes)
    return {
        "parameter_bytes": [stage.parameter_bytes for stage in memory],
        "weight_version_bytes": [stage.weight_version_bytes for stage in memory],
        "predicted_weight_version_bytes": [
            count * stage.parameter_bytes for stage, count in zip(memory, versions, strict=True)
        ],
        "activation_bytes": [stage.activation_bytes for stage in memory],
        "stash_bytes": [stage.stash_bytes for stage in memory],
        "predicted_bytes": prediction,
        "measured_to_predicted": [
            stage.activation_bytes / bytes_ for stage, bytes_ in zip(memory, prediction, strict=True)
        ],
        "largest": largest,
    }


def show(parties: dict[str, dict[str, Any]], size: Size) -> None:
    rows = []
    for name, party in parties.items():
        worker = party["largest"]
        ratios = party["measured_to_predicted"]
        rows.append(
            [
                name,
                f"{party['parameter_bytes'][worker] / 2**20:.2f}",
                f"{party['weight_version_bytes'][worker] / 2**20:.2f}",
                f"{party['predicted_weight_version_bytes'][worker] / 2**20:.2f}",
                f"{party['activation_bytes'][worker] / 2**20:.2f}",
                f"{party['predicted_bytes'][worker] / 2**20:.2f}",
                f"{min(ratios):.3f}–{max(ratios):.3f}",
            ]
        )
    title = f"{size.blocks} blocks of width {size.width}, {size.microbatches} micro-batches of {size.rows}; MiB"
    columns = [
        "stages, schedule, recompute",
        "parameters",
        "older weights",
        "predicted",
        "activations",
        "predicted",
        "measured / predicted, all stages",
    ]
    show_table(title, columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="2,4", help="numbers, with commas: %(default)s")
    parser.add_argument("--blocks", type=int, default=16, help="a multiple of twice every number of stages")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=64, help="samples of a micro-batch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="a small stack in two stages: only to see that it works")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    size = Size(options.blocks, options.width, options.rows, options.microbatches)
    stages = [int(number) for number in options.stages.split(",")]
    if options.quick:
        size, stages = Size(4, 16, 4, 4), [2]
    for number in stages:
        if size.blocks % (2 * number):
            parser.error(f"{size.blocks} blocks do not divide into two stages for each of {number} workers")
    parties = {
        f"{number} {schedule} {recompute}": figures_of(size, number, schedule, recompute)
        for number in stages
        for schedule in SCHEDULES
        for recompute in (RECOMPUTES if schedule in RECOMPUTED else ["none"])
    }
    show(parties, size)
    figures = {
        "benchmark": "memory",
        "machine": {**machine(), "torch": torch.__version__},
        "settings": {**size._asdict(), "stages": stages, "mode": "thread"},
        "parties": parties,
    }
    write_json(figures, options.json)


if __name__ == "__main__":
    main()
