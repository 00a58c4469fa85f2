"""Measure the pipeline engine's cost per action with stages that compute nothing, in processes.

    python -m benchmarks.engine [--repeats 7] [--quick] [--json FILE]

A step of m micro-batches on 2 stages has 2m actions on each. With empty layers its time is a fixed part (calls to the
workers, the update) and one that grows with m; the slope over m, divided by the 2 actions of a micro-batch on a stage,
is the cost of an action where it hurts: on the critical path. The floor is torch's own: the same forwards and
backwards in one process, without an engine.
"""

import argparse
import contextlib
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from benchmarks.report import machine, show_table, spread, write_json

SCHEDULES = ("gpipe", "1f1b")
MODES = ("process", "thread")
FEW, MANY = 8, 64  # micro-batches
_WIDTH = 16
ALONE = "torch alone"


class Empty(nn.Module):
    """Next to nothing, but with a parameter, so that there is a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def sgd(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-9)


class Feeder:
    """A feeder of batches with one row for each micro-batch."""

    def __init__(self, microbatches: int) -> None:
        self._batch = (torch.ones(microbatches, _WIDTH), torch.ones(microbatches, 1))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self._batch


@contextlib.contextmanager
def launched(mode: str, schedule: str, microbatches: int, run_dir: str) -> Iterator[pp.PipelineClient]:
    """Two empty stages."""
    program = lp.Program("bench_engine")
    feeder = program.add_node(lp.CourierNode(Feeder, microbatches), label="feeder")
    model = pp.Model([Empty(), Empty()], loss=mean, optimizer=sgd)
    pipeline = pp.add_pipeline(program, model, stages=2, schedule=schedule, microbatches=microbatches, inputs=feeder)
    with lp.launch(program, mode, run_dir=run_dir) as run:
        yield run.client(pipeline)


def pipeline_step(client: pp.PipelineClient) -> Callable[[], object]:
    return client.step


def torch_step(microbatches: int) -> Callable[[], object]:
    """The two stages' autograd work, one after another in this process."""
    stages = (Empty(), Empty())
    x = torch.ones(1, _WIDTH)

    def step() -> None:
        for _ in range(microbatches):
            sent = stages[0](x)
            received = sent.detach().requires_grad_()
            mean(stages[1](received), x).backward()
            sent.backward(received.grad)

    return step


def median_s(step: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        start = time.monotonic()
        step()
        times.append(time.monotonic() - start)
    return statistics.median(times)


def measure(steps: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """party -> {few, many}: seconds of a step, one for each round."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lp-bench-"))
        parties: dict[str, dict[str, Callable[[], object]]] = {
            ALONE: {"few": torch_step(FEW), "many": torch_step(MANY)}
        }
        for mode in MODES:
            for schedule in SCHEDULES:
                parties[f"{mode}/{schedule}"] = {
                    name: pipeline_step(
                        stack.enter_context(launched(mode, schedule, count, f"{folder}/{mode}-{schedule}-{count}"))
                    )
                    for name, count in (("few", FEW), ("many", MANY))
                }
        times: dict[str, dict[str, list[float]]] = {party: {"few": [], "many": []} for party in parties}
        for party in parties.values():
            for step in party.values():
                median_s(step, 3)
        for _ in range(repeats):
            for name, party in parties.items():
                for size, step in party.items():
                    times[name][size].append(median_s(step, steps))
    return times


def actions_us(times: dict[str, list[float]], actions: int) -> list[float]:
    """An action of each round. actions: how many each micro-batch costs one after another."""
    rounds = zip(times["few"], times["many"], strict=True)
    return [(many - few) / (MANY - FEW) / actions * 1e6 for few, many in rounds]


def figures_of(times: dict[str, list[float]], actions: int, floor_us: list[float]) -> dict[str, Any]:
    """floor_us: torch's own action of each round."""
    each_us = actions_us(times, actions)
    best_slope = (min(times["many"]) - min(times["few"])) / (MANY - FEW)
    return {
        "action_us": {**spread(each_us), "best": best_slope / actions * 1e6},
        "above_torch_us": spread(own - floor for own, floor in zip(each_us, floor_us, strict=True)),
        "fixed_us": max(0.0, min(times["few"]) - FEW * best_slope) * 1e6,
        "step_us": {size: spread(seconds * 1e6 for seconds in values) for size, values in times.items()},
    }


def show(parties: dict[str, dict[str, Any]]) -> None:
    rows = []
    for name, party in parties.items():
        action, few, many = party["action_us"], party["step_us"]["few"], party["step_us"]["many"]
        above = party["above_torch_us"]
        rows.append(
            [
                name,
                f"{action['median']:.0f} ({action['min']:.0f}–{action['max']:.0f}), best {action['best']:.0f}",
                f"{above['median']:.0f} ({above['min']:.0f}–{above['max']:.0f})" if name != ALONE else "",
                f"{party['fixed_us']:.0f}",
                f"{few['median']:.0f} (from {few['min']:.0f})",
                f"{many['median']:.0f} (from {many['min']:.0f})",
            ]
        )
    columns = ["empty stages", "an action", "above torch", "fixed per step", f"step, m = {FEW}", f"step, m = {MANY}"]
    show_table("cost of the engine in µs: 2 stages, median (min–max) of the rounds", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--quick", action="store_true", help="few steps: only to see that it works")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    steps, repeats = (3, 2) if options.quick else (20, options.repeats)
    measured = measure(steps, repeats)
    actions = {name: 4 if name == ALONE else 2 for name in measured}
    floor_us = actions_us(measured[ALONE], actions[ALONE])
    parties = {name: figures_of(times, actions[name], floor_us) for name, times in measured.items()}
    show(parties)
    settings = {"steps": steps, "repeats": repeats, "microbatches": [FEW, MANY]}
    write_json({"benchmark": "engine", "machine": machine(), "settings": settings, "parties": parties}, options.json)


if __name__ == "__main__":
    main()
