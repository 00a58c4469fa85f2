"""Compare schedules with their simulation: stages that sleep instead of computing, real tensors between processes.

    python -m benchmarks.schedules [--schedules 1f1b,zbv] [--workers 2,4] [--microbatches 1,4,32] [--full] [--json FILE]

Forward, backward for inputs and backward for weights of a virtual stage are one sleep each, all of the same length, so
stages need no cores and a step's makespan (from the first action's start to the last one's end) can be compared with
theory: `pp.simulate` of the same schedule with free communication. A sleep ends late, on a busy machine by
milliseconds, which is no matter of the engine: the simulation's costs are what the sleeps of each stage have really
taken, on average, in these very steps.

What the layers take beside their sleep is not nothing, though: a process that has slept finds nothing of its own in the
core's caches. "alone / theory" says it: every worker's layers in a plain loop, forwards and backwards, in as many
processes at once, without a pipeline, in units of what they slept.

Beside it torch.distributed.pipelining over gloo, where it has the schedule, with the same layers and sleeps compared
with the same theory; its makespan is that of its `step`, from a barrier to the last rank's return.
"""

import argparse
import concurrent.futures
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lp_pipe as lp
import lp_pipe.pipeline as pp
from benchmarks import torch_schedules
from benchmarks.report import machine, show_table, spread, write_json
from benchmarks.sleeping import Sleeper, Slept, Start, alone, batch, mean, sgd, slept
from lp_pipe.errors import ScheduleError

_ALL = [name for name in pp.schedules() if name != "forward" and not name.startswith("pipedream")]


class Case(NamedTuple):
    """A pipeline. `sleep_s`: the seconds of each virtual stage, for each of F, I and W."""

    name: str
    workers: int
    microbatches: int
    sleep_s: float

    @property
    def label(self) -> str:
        return f"{self.name} K={self.workers} M={self.microbatches}"

    def schedule(self) -> pp.Schedule:
        """Raises: ScheduleError: there is none for these numbers."""
        return pp.make_schedule(self.name, self.workers, self.microbatches)


class Outcome(NamedTuple):
    """Seconds of each step, and what each virtual stage slept in all of them."""

    makespans_s: list[float]
    slept: list[Slept]


class Feeder:
    """The same batch in every step."""

    def __init__(self, microbatches: int) -> None:
        self._batch = batch(microbatches)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self._batch


def measured(case: Case, repeats: int, folder: str) -> Outcome:
    """Steps of a pipeline in processes, after one to warm up."""
    stages = case.schedule().stages
    run_dir = pathlib.Path(folder) / case.label.replace(" ", "-")
    records = [run_dir.with_suffix(f".{stage}") for stage in range(stages)]
    program = lp.Program(f"bench_{case.name}")
    feeder = program.add_node(lp.CourierNode(Feeder, case.microbatches), label="feeder")
    pipeline = pp.add_pipeline(
        program,
        pp.Model([pp.Layer(Start), *(pp.Layer(Sleeper, case.sleep_s, record) for record in records)], mean, sgd),
        stages=list(range(2, stages + 1)),  # the first one has the start, too
        schedule=case.name,
        microbatches=case.microbatches,
        inputs=feeder,
    )
    with lp.launch(program, "process", run_dir=run_dir) as run:
        client = run.client(pipeline)
        client.step()
        before = [slept(record) for record in records]
        traces = client.trace(repeats)
        after = [slept(record) for record in records]
    in_steps = [late.since(early) for late, early in zip(after, before, strict=True)]
    return Outcome([makespan_s(trace) for trace in traces], in_steps)


def makespan_s(trace: pp.StepTrace) -> float:
    return max(spans[-1][2] for spans in trace.workers) - min(spans[0][1] for spans in trace.workers)


def measured_of_torch(case: Case, repeats: int, folder: str) -> Outcome:
    """The same with torch's own schedule."""
    placement = case.schedule().placement
    store = f"{folder}/torch-{case.label.replace(' ', '-')}"
    arguments = (case.name, placement, case.sleep_s, case.microbatches, repeats, store)
    ranks = torch_schedules.run(*arguments)
    steps = zip(*(rank.steps for rank in ranks), strict=True)
    makespans = [max(end for _, end in step) - min(start for start, _ in step) for step in steps]
    by_stage = {stage: own for rank in ranks for stage, own in rank.slept.items()}
    return Outcome(makespans, [by_stage[stage] for stage in sorted(by_stage)])


def layers_alone(case: Case) -> float:
    """Measure a worker's layers without a pipeline, while the other workers' do the same, relative to their sleep."""
    count, layers = case.workers, case.schedule().stages // case.workers
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(count, mp_context=spawn) as pool:
        turns = [pool.submit(alone, case.sleep_s, layers, case.microbatches) for _ in range(count)]
        return statistics.mean(turn.result() for turn in turns)


def simulated(case: Case, outcome: Outcome) -> pp.Timeline:
    """The schedule with stages that take what they slept."""
    costs = [[stage[part] / stage.forwards for stage in outcome.slept] for part in range(3)]
    return pp.simulate(case.schedule(), pp.Costs(forward=costs[0], backward_input=costs[1], backward_weight=costs[2]))


def compared(case: Case, outcome: Outcome) -> dict[str, Any]:
    theory = simulated(case, outcome)
    return {
        "theory_ms": theory.makespan * 1e3,
        "theory_bubble": theory.bubble,
        "measured_ms": spread(value * 1e3 for value in outcome.makespans_s),
        "measured_to_theory": spread(value / theory.makespan for value in outcome.makespans_s),
    }


def figures_of(case: Case, repeats: int, folder: str, *, with_torch: bool) -> dict[str, Any]:
    figures = compared(case, measured(case, repeats, folder))
    peaks = pp.peak_activations(case.schedule())
    figures |= {"schedule": case.name, "workers": case.workers, "microbatches": case.microbatches}
    figures |= {"peak_activations": peaks, "alone_to_theory": layers_alone(case), "torch": None}
    if with_torch and case.name in torch_schedules.SCHEDULES:
        try:
            figures["torch"] = compared(case, measured_of_torch(case, repeats, folder))
        except RuntimeError as error:
            sys.stderr.write(f"{case.label}: {error}\n")
    return figures


def show(parties: dict[str, dict[str, Any]], action_s: float) -> None:
    rows = [
        [
            name,
            f"{party['theory_ms']:.1f}",
            f"{party['theory_bubble']:.1%}",
            _cell(party["measured_ms"], ".1f"),
            _cell(party["measured_to_theory"], ".3f"),
            f"{party['alone_to_theory']:.3f}",
            _cell(party["torch"] and party["torch"]["measured_to_theory"], ".3f"),
            f"{max(party['peak_activations']):g}",
        ]
        for name, party in parties.items()
    ]
    title = f"F = I = W = {action_s * 1e3:g} ms of a virtual stage; median (min–max)"
    columns = [
        "",
        "theory ms",
        "bubble",
        "measured ms",
        "measured / theory",
        "alone / theory",
        "torch / theory",
        "stash, in stages",
    ]
    show_table(title, columns, rows)


def _cell(values: dict[str, Any] | None, form: str) -> str:
    if values is None:
        return ""
    return f"{values['median']:{form}} ({values['min']:{form}}–{values['max']:{form}})"


def cases(names: list[str], workers: list[int], microbatches: list[int], action_s: float) -> list[Case]:
    """Return the schedules that exist; others are named on stderr."""
    found = []
    for name in names:
        for count in workers:
            for m in microbatches:
                case = Case(name, count, m, action_s)
                try:
                    case.schedule()
                except ScheduleError as error:
                    sys.stderr.write(f"left out: {error}\n")
                else:
                    found.append(case)
    return found


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default=",".join(_ALL), help="names, with commas: %(default)s")
    parser.add_argument("--workers", type=_numbers, default=[4], help="numbers, with commas: 4")
    parser.add_argument("--microbatches", type=_numbers, default=[8], help="numbers, with commas: 8")
    parser.add_argument("--full", action="store_true", help="2, 4 and 8 workers, 1, 4 and 32 micro-batches")
    parser.add_argument("--action-ms", type=float, default=40.0, help="what F, I and W of a virtual stage sleep")
    parser.add_argument("--repeats", type=int, default=5, help="steps of each schedule")
    parser.add_argument("--no-torch", action="store_true", help="without torch.distributed.pipelining")
    parser.add_argument("--quick", action="store_true", help="short sleeps, few steps: only to see that it works")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    action_s, repeats = (0.002, 2) if options.quick else (options.action_ms / 1e3, options.repeats)
    workers, microbatches = ([2, 4, 8], [1, 4, 32]) if options.full else (options.workers, options.microbatches)
    with tempfile.TemporaryDirectory(prefix="lp-bench-") as folder:
        parties = {
            case.label: figures_of(case, repeats, folder, with_torch=not options.no_torch)
            for case in cases(options.schedules.split(","), workers, microbatches, action_s)
        }
    show(parties, action_s)
    settings = {"action_ms": action_s * 1e3, "repeats": repeats, "mode": "process"}
    figures = {
        "benchmark": "schedules",
        "machine": {**machine(), "torch": torch.__version__},
        "settings": settings,
        "parties": parties,
    }
    write_json(figures, options.json)


if __name__ == "__main__":
    main()
