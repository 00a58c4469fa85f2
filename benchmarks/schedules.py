"""What schedules promise and what they keep: 4 stages that sleep instead of computing, real tensors between processes.

    python -m benchmarks.schedules [--schedules 1f1b,zb_h1,zbv,dualpipev] [--repeats 7] [--quick] [--json FILE]

Forward, backward for inputs and backward for weights of a stage sleep equally long, so stages need no cores and a
step's makespan (from the first action's start to the last one's end) can be compared with theory: `pp.simulate` of the
same schedule with the same costs and free communication. Every schedule runs the same 8 layers: two for each worker, as
one stage or as two. On a busy machine longer sleeps (--action-ms) come closer to theory.
"""

import argparse
import pathlib
import tempfile
import time
from typing import Any

import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from benchmarks.report import machine, show_table, spread, write_json

SCHEDULES = ("1f1b", "zb_h1", "zbv", "dualpipev")
WORKERS = 4
_LAYERS_EACH = 2
_WIDTH = 4096  # 16 KiB a micro-batch


class _Sleep(torch.autograd.Function):
    """Passes its input on: after `forward_s` there, after `backward_s` back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Sleeper(nn.Module):
    """Takes `seconds` for each of its forward, its input's gradient and its weight's gradient."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x, self.seconds, self.seconds)  # type: ignore[no-untyped-call]
        scale: Tensor = _Sleep.apply(self.scale, 0.0, self.seconds)  # type: ignore[no-untyped-call]
        return y * scale


class Start(nn.Module):
    """Makes the first sleeper's input want a gradient, as an embedding would."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def sgd(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-9)


class Feeder:
    """One row for each micro-batch."""

    def __init__(self, microbatches: int) -> None:
        self._batch = (torch.ones(microbatches, _WIDTH), torch.ones(microbatches, 1))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self._batch


def measured(name: str, microbatches: int, action_s: float, repeats: int, folder: str) -> list[pp.StepTrace]:
    """Steps of a pipeline in processes, after one to warm up."""
    schedule = pp.make_schedule(name, WORKERS, microbatches)
    layers = WORKERS * _LAYERS_EACH
    sleepers = [pp.Layer(Sleeper, action_s / _LAYERS_EACH) for _ in range(layers)]
    program = lp.Program(f"bench_{name}")
    feeder = program.add_node(lp.CourierNode(Feeder, microbatches), label="feeder")
    pipeline = pp.add_pipeline(
        program,
        pp.Model([pp.Layer(Start), *sleepers], mean, sgd),
        stages=[1 + cut for cut in range(layers // schedule.stages, layers, layers // schedule.stages)],
        schedule=name,
        microbatches=microbatches,
        inputs=feeder,
    )
    with lp.launch(program, "process", run_dir=f"{folder}/{name}") as run:
        return run.client(pipeline).trace(1 + repeats)[1:]


def makespan_s(trace: pp.StepTrace) -> float:
    return max(spans[-1][2] for spans in trace.workers) - min(spans[0][1] for spans in trace.workers)


def figures_of(name: str, traces: list[pp.StepTrace], microbatches: int, action_s: float) -> dict[str, Any]:
    schedule = pp.make_schedule(name, WORKERS, microbatches)
    each = action_s * WORKERS / schedule.stages
    theory = pp.simulate(schedule, pp.Costs(forward=each, backward_input=each, backward_weight=each))
    seconds = [makespan_s(trace) for trace in traces]
    work_s = 3 * microbatches * action_s  # of each worker
    return {
        "theory_ms": theory.makespan * 1e3,
        "measured_ms": spread(value * 1e3 for value in seconds),
        "measured_to_theory": spread(value / theory.makespan for value in seconds),
        "theory_bubble": theory.bubble,
        "measured_bubble": spread(1 - work_s / value for value in seconds),
        "peak_activations": [peak * WORKERS / schedule.stages for peak in theory.peak_activations],
    }


def show(parties: dict[str, dict[str, Any]], microbatches: int, action_s: float) -> None:
    rows = [
        [
            name,
            f"{party['theory_ms']:.1f}",
            _cell(party["measured_ms"], ".1f"),
            _cell(party["measured_to_theory"], ".3f"),
            f"{party['theory_bubble']:.1%}",
            f"{party['measured_bubble']['median']:.1%}",
            f"{max(party['peak_activations']):g}",
        ]
        for name, party in parties.items()
    ]
    title = f"{WORKERS} workers, {microbatches} micro-batches, F = I = W = {action_s * 1e3:g} ms; median (min–max)"
    columns = ["", "theory ms", "measured ms", "measured / theory", "bubble, theory", "measured", "stash, in stages"]
    show_table(title, columns, rows)


def _cell(values: dict[str, Any], form: str) -> str:
    return f"{values['median']:{form}} ({values['min']:{form}}–{values['max']:{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="names, with commas: %(default)s")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--action-ms", type=float, default=40.0, help="what F, I and W of a worker sleep")
    parser.add_argument("--repeats", type=int, default=7, help="steps of each schedule")
    parser.add_argument("--quick", action="store_true", help="short sleeps, few steps: only to see that it works")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    action_s, repeats = (0.002, 2) if options.quick else (options.action_ms / 1e3, options.repeats)
    parties = {}
    with tempfile.TemporaryDirectory(prefix="lp-bench-") as folder:
        for name in options.schedules.split(","):
            traces = measured(name, options.microbatches, action_s, repeats, folder)
            parties[name] = figures_of(name, traces, options.microbatches, action_s)
    show(parties, options.microbatches, action_s)
    settings = {
        "workers": WORKERS,
        "microbatches": options.microbatches,
        "action_ms": action_s * 1e3,
        "repeats": repeats,
        "mode": "process",
    }
    figures = {
        "benchmark": "schedules",
        "machine": {**machine(), "torch": torch.__version__},
        "settings": settings,
        "parties": parties,
    }
    write_json(figures, options.json)


if __name__ == "__main__":
    main()
