"""Measure asynchronous 1F1B: throughput of a full pipeline, and updates until the same validation loss.

    python -m benchmarks.asynchronous [--only throughput|quality] [--seeds 1] [--quick] [--json FILE]

Throughput: four stages that sleep instead of computing, in processes. A full pipeline does a micro-batch in the time of
its slowest stage, which is what the sleeps of that stage have really taken; GPipe with 4 micro-batches is at 4/7 of
that in theory.

Quality: four stages train scikit-learn's digits, and a small GPT on the characters of Python's standard library.
Every party sees the same samples in the same order, as many for each update, with the same optimizer and the same
learning rates over its updates: a warm-up of as many updates for all, then a cosine. (During a step, which may have
several updates, the rate is that of its middle.) The reference is synchronous 1F1B; the asynchronous schedules train
for a tenth more updates. Each seed has weights and samples of its own. The delay of a few updates counts the less, the
longer the training is: after 800 of them, while the GPT still learns fast, weight stashing was 0.5 to 0.8 % behind
(three seeds), after 1600 level (0.3 % ahead over three seeds, none more than 0.03 % behind).
"""

import argparse
import functools
import itertools
import pathlib
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lp_pipe as lp
import lp_pipe.pipeline as pp
from benchmarks.report import machine, show_table, spread, write_json
from benchmarks.sleeping import Sleeper, Start, batch, mean, sgd, slept
from examples import char_gpt

_STAGES = 4
_UPDATES_EACH = {"1f1b": 1, "pipedream": 8, "pipedream_2bw": 2}  # of a step
_MORE = 1.1  # times the reference's updates
_SAMPLES_OF_A_SEED = 1_000_000


# --- Throughput ---


class SameBatch:
    """The same batch in every step, without end."""

    def __init__(self, microbatches: int) -> None:
        self._batch = batch(microbatches)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self._batch


def throughput(schedule: str, microbatches: int, steps: int, sleep_s: float, folder: str) -> dict[str, Any]:
    """Measure the pipeline's share of the slowest stage's rate in each step, without the first two and the last one."""
    run_dir = pathlib.Path(folder) / f"{schedule}-{microbatches}"
    records = [run_dir.with_suffix(f".{stage}") for stage in range(_STAGES)]
    program = lp.Program(f"bench_{schedule}")
    feeder = program.add_node(lp.CourierNode(SameBatch, microbatches), label="feeder")
    pipeline = pp.add_pipeline(
        program,
        pp.Model([pp.Layer(Start), *(pp.Layer(Sleeper, sleep_s, record) for record in records)], mean, sgd),
        stages=[2, 3, 4],
        schedule=schedule,
        microbatches=microbatches,
        inputs=feeder,
    )
    with lp.launch(program, "process", run_dir=run_dir) as run:
        traces = run.client(pipeline).trace(steps)
    slowest_s = max(sum(parts[:3]) / parts.forwards for parts in map(slept, records))
    ends = [max(span[2] for span in trace.workers[0]) for trace in traces]
    rates = [microbatches / (end - before) for before, end in itertools.pairwise(ends[1:-1])]
    return {
        "slowest_stage_ms": slowest_s * 1e3,
        "of_limit": spread(rate * slowest_s for rate in rates),
    }


# --- Quality ---


@dataclass(frozen=True)
class Task:
    """samples(first, count): training samples of that range. Picklable."""

    name: str
    layers: Callable[[], list[nn.Module]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    samples: Callable[[int, int], tuple[Tensor, Tensor]]
    validation: Callable[[], list[tuple[Tensor, Tensor]]]
    batch_size: int
    updates: int


class Samples:
    """Batches that follow each other through a task's samples, from another place for each seed."""

    def __init__(self, task: Task, batch_size: int, seed: int) -> None:
        self._task = task
        self._size = batch_size
        self._first = seed * _SAMPLES_OF_A_SEED

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self._task.samples(self._first + step * self._size, self._size)


def learning_rates(
    optimizer: torch.optim.Optimizer, updates: int, updates_each: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Each step's is that of its middle, in updates."""

    def share(step: int) -> float:
        return char_gpt.warmup_then_cosine(step * updates_each + (updates_each - 1) / 2, updates)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def final_loss(task: Task, schedule: str, updates: int, seed: int, folder: str) -> float:
    """Validation loss after so many updates, with a learning rate that goes to nearly zero on the way."""
    updates_each = _UPDATES_EACH[schedule]
    steps = updates // updates_each
    program = lp.Program("bench_quality")
    feeder = program.add_node(lp.CourierNode(Samples, task, updates_each * task.batch_size, seed), label="feeder")
    scheduler = functools.partial(learning_rates, updates=updates, updates_each=updates_each)
    model = pp.Model(task.layers, task.loss, task.optimizer, lr_scheduler=scheduler, seed=seed)
    options: dict[str, Any] = {"microbatches": 4 if schedule == "1f1b" else 8, "inputs": feeder}
    pipeline = pp.add_pipeline(program, model, stages=_STAGES, schedule=schedule, **options)
    with lp.launch(program, "process", run_dir=f"{folder}/{task.name}-{schedule}-{seed}".replace(" ", "-")) as run:
        client = run.client(pipeline)
        for _ in client.steps(steps):
            pass
        return client.evaluate(task.validation()).loss


def quality(task: Task, seeds: int, folder: str) -> dict[str, dict[str, Any]]:
    longer = int(task.updates * _MORE / 8) * 8
    losses = {
        (schedule, updates): [final_loss(task, schedule, updates, seed, folder) for seed in range(seeds)]
        for schedule, updates in (("1f1b", task.updates), ("pipedream", longer), ("pipedream_2bw", longer))
    }
    reference = losses["1f1b", task.updates]
    return {
        f"{task.name}, {schedule}, {updates} updates": {
            "losses": own,
            "loss": statistics.mean(own),
            "to_synchronous": statistics.mean(own) / statistics.mean(reference),
            "to_synchronous_each": [mine / theirs for mine, theirs in zip(own, reference, strict=True)],
        }
        for (schedule, updates), own in losses.items()
    }


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def _digit_layers() -> list[nn.Module]:
    return [
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    ]  # fmt: skip


def _digit_samples(first: int, count: int) -> tuple[Tensor, Tensor]:
    images, labels = _digits()
    chosen = torch.arange(first, first + count) % (len(labels) - 360)
    return images[chosen], labels[chosen]


def _digit_validation() -> list[tuple[Tensor, Tensor]]:
    images, labels = _digits()
    return [(images[-360:], labels[-360:])]


_GPT = char_gpt.Config(batch_size=16, context=64, width=64, layers=2, heads=2, dropout=0.0)


@functools.cache
def _text() -> char_gpt.Feeder:
    return char_gpt.Feeder(1, _GPT.context, seed=0)


def _gpt_layers() -> list[nn.Module]:
    return [factory() for _, factory in char_gpt.layer_factories(_GPT)]


def _gpt_samples(first: int, count: int) -> tuple[Tensor, Tensor]:
    pairs = [_text().batch(index) for index in range(first, first + count)]
    return torch.cat([value for value, _ in pairs]), torch.cat([target for _, target in pairs])


def _gpt_validation() -> list[tuple[Tensor, Tensor]]:
    pairs = _text().validation(128)
    return [(torch.cat([value for value, _ in pairs]), torch.cat([target for _, target in pairs]))]


def _gpt_loss(output: Tensor, target: Tensor) -> Tensor:
    return char_gpt.loss(output, target)[0]


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def tasks(*, quick: bool) -> list[Task]:
    digits_updates, gpt_updates = (16, 8) if quick else (800, 1600)
    return [
        Task("digits", _digit_layers, F.cross_entropy, _sgd, _digit_samples, _digit_validation, 32, digits_updates),
        Task("char GPT", _gpt_layers, _gpt_loss, _adamw, _gpt_samples, _gpt_validation, 16, gpt_updates),
    ]


def show(speeds: dict[str, dict[str, Any]], qualities: dict[str, dict[str, Any]]) -> None:
    if speeds:
        rows = [
            [name, f"{party['slowest_stage_ms']:.1f}", "{median:.3f} ({min:.3f}–{max:.3f})".format(**party["of_limit"])]
            for name, party in speeds.items()
        ]
        show_table("4 sleeping stages, median (min–max)", ["", "slowest stage ms", "of 1 / slowest stage"], rows)
    if qualities:
        rows = [
            [
                name,
                f"{party['loss']:.4f}",
                f"{party['to_synchronous']:.3f}",
                " ".join(f"{ratio:.3f}" for ratio in party["to_synchronous_each"]),
            ]
            for name, party in qualities.items()
        ]
        show_table("4 stages, means over the seeds", ["", "validation loss", "to synchronous", "each seed"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["throughput", "quality"], help="one of the two parts")
    parser.add_argument("--action-ms", type=float, default=40.0, help="what F, I and W of a stage sleep")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each party, for the quality: %(default)s")
    parser.add_argument("--quick", action="store_true", help="short sleeps, few updates: only to see that it works")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    sleep_s = 0.002 if options.quick else options.action_ms / 1e3
    speeds: dict[str, dict[str, Any]] = {}
    qualities: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="lp-bench-") as folder:
        if options.only != "quality":
            for schedule, microbatches in (("gpipe", 4), ("1f1b", 4), ("pipedream", 8), ("pipedream_2bw", 8)):
                label = f"{schedule}, {microbatches} micro-batches"
                speeds[label] = throughput(schedule, microbatches, 12, sleep_s, folder)
        if options.only != "throughput":
            for task in tasks(quick=options.quick):
                qualities |= quality(task, 1 if options.quick else options.seeds, folder)
    show(speeds, qualities)
    figures = {
        "benchmark": "asynchronous",
        "machine": {**machine(), "torch": torch.__version__},
        "throughput": speeds,
        "quality": qualities,
    }
    write_json(figures, options.json)


if __name__ == "__main__":
    main()
