"""Pipeline throughput with 2 stages and real compute: lp_pipe, torch's pipelining, a single loop, and the limit.

    python -m benchmarks.pipeline [--models mlp,gpt,gpt_wide] [--microbatches 8] [--repeats 7] [--quick] [--json FILE]

All parties train the same model on the same micro-batches, with 1 thread in each process, forwards, backwards and
optimizer; their losses must agree. They take turns, round after round, so that a busy machine slows all of them;
ratios are taken within a round, and of the fastest steps ("best").

The limit is what no pipeline can beat here: both halves compute at once without a word to each other, the slower one
all the time, the other one alone for one micro-batch at the ends (the bubble: m/(m + 1) of the time is of use when the
halves are equal), then the optimizers. There each backward comes right behind its forward, whose activations are still
in the core's caches; a schedule keeps more of them. What that costs is no engine's fault: "its own limit" is the same
with both halves computing in the order of the schedule.
"""

import argparse
import contextlib
import functools
import itertools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import lp_pipe as lp
import lp_pipe.pipeline as pp
from benchmarks.ranks import Ranks, two_ranks
from benchmarks.report import machine, show_table, spread, write_json
from benchmarks.workloads import MODELS, QUICK_MODELS, Batch, Workload

SCHEDULES = ["gpipe", "1f1b"]
_TOLERANCE = 1e-3  # torch's pipelining adds the micro-batches' gradients up before it divides them
_WARMUP_STEPS = 2
_OTHERS = {"single": "single", "limit": "limit", "own_limit": "its own limit", "torch": "torch"}


class Feeder:
    """Serves the workload's batches."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def batch(self, step: int) -> Batch:
        return self._workload.batch(step)


class Turn(NamedTuple):
    """Seconds and loss of each step of a party's turn."""

    step_s: list[float]
    losses: list[float]


@contextlib.contextmanager
def launched(workload: Workload, microbatches: int, schedule: str, run_dir: str) -> Iterator[pp.PipelineClient]:
    """The workload as an lp_pipe program: a feeder and two stages, each a process."""
    program = lp.Program(f"bench_{workload.name}")
    feeder = program.add_node(lp.CourierNode(Feeder, workload), label="feeder")
    pipeline = pp.add_pipeline(
        program,
        workload.model(),
        stages=[workload.cut],
        schedule=schedule,
        microbatches=microbatches,
        channel="shm",
        inputs=feeder,
    )
    with lp.launch(program, "process", run_dir=run_dir) as run:
        yield run.client(pipeline)


def lp_pipe_turn(client: pp.PipelineClient, steps: int) -> Turn:
    """Train as a user's loop does."""
    step_s, losses = [], []
    start = time.monotonic()
    for result in client.steps(steps):
        losses.append(result.loss)
        end = time.monotonic()
        step_s.append(end - start)
        start = end
    return Turn(step_s, losses)


def rank_turn(ranks: Ranks, party: str, first_step: int, steps: int) -> Turn:
    timings = ranks.run(party, first_step, steps)
    return Turn([max(both) for both in zip(*(timing.step_s for timing in timings), strict=True)], timings[-1].losses)


def limit_turn(
    ranks: Ranks, microbatches: int, steps: int, halves_party: str = "halves"
) -> tuple[Turn, list[list[float]]]:
    """The fastest possible steps, from both halves running at once; also the seconds that each half computed."""
    halves = ranks.run(halves_party, 0, steps)
    compute_s = [[step - update for step, update in zip(h.step_s, h.optimizer_s, strict=True)] for h in halves]
    step_s = [
        max(ours, theirs) + min(ours, theirs) / microbatches + max(updates)
        for ours, theirs, *updates in zip(*compute_s, *(half.optimizer_s for half in halves), strict=True)
    ]
    return Turn(step_s, []), compute_s


class Comparison:
    """All parties on one workload, round after round."""

    def __init__(self, workload: Workload, microbatches: int, steps: int) -> None:
        self._workload = workload
        self._microbatches = microbatches
        self._steps = steps
        self._step_s: dict[str, list[list[float]]] = {}  # by party, one list for each round
        self._losses: dict[str, list[float]] = {}
        self._compute_s: list[list[float]] = [[], []]
        self._where: dict[str, dict[str, float]] = {}

    def run(self, repeats: int) -> dict[str, Any]:
        """Start everybody, warm up, take turns; returns the figures."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lp-bench-"))
            ranks = stack.enter_context(two_ranks(self._workload, self._microbatches, SCHEDULES, f"{folder}/store"))
            clients = {
                schedule: stack.enter_context(
                    launched(self._workload, self._microbatches, schedule, f"{folder}/{schedule}")
                )
                for schedule in SCHEDULES
            }
            parties = self._parties(ranks, clients)
            self._round(parties, 0, _WARMUP_STEPS)
            self._step_s, self._compute_s = {}, [[], []]
            for index in range(repeats):
                self._round(parties, _WARMUP_STEPS + index * self._steps, self._steps)
            self._where = {schedule: self._explain(client) for schedule, client in clients.items()}
        return self._figures()

    def _parties(self, ranks: Ranks, clients: dict[str, pp.PipelineClient]) -> dict[str, Callable[[int, int], Turn]]:
        """Return the parties in the order of their turns."""
        parties = {"single": self._rank_party(ranks, "single")}
        for schedule, client in clients.items():
            parties[f"lp_pipe/{schedule}"] = functools.partial(_lp_pipe_party, client)
            parties[f"torch/{schedule}"] = self._rank_party(ranks, f"torch/{schedule}")
            parties[f"limit/{schedule}"] = functools.partial(self._own_limit, ranks, schedule)
        parties["limit"] = lambda first, steps: self._limit(ranks, steps)
        return parties

    @staticmethod
    def _rank_party(ranks: Ranks, name: str) -> Callable[[int, int], Turn]:
        return functools.partial(rank_turn, ranks, name)

    def _limit(self, ranks: Ranks, steps: int) -> Turn:
        turn, compute_s = limit_turn(ranks, self._microbatches, steps)
        for kept, new in zip(self._compute_s, compute_s, strict=True):
            kept.extend(new)
        return turn

    def _own_limit(self, ranks: Ranks, schedule: str, first_step: int, steps: int) -> Turn:
        return limit_turn(ranks, self._microbatches, steps, f"halves/{schedule}")[0]

    def _round(self, parties: dict[str, Callable[[int, int], Turn]], first_step: int, steps: int) -> None:
        for name, run in parties.items():
            turn = run(first_step, steps)
            self._step_s.setdefault(name, []).append(turn.step_s)
            self._losses.setdefault(name, []).extend(turn.losses)

    def _explain(self, client: pp.PipelineClient) -> dict[str, float]:
        """Measure the parts of a step: medians over a few more steps, in ms. update: after the last action."""
        traces = client.trace(max(2, self._steps))
        parts = [_parts(trace) for trace in traces]
        found = {name: statistics.median(part[name] for part in parts) for name in parts[0]}
        whole = [later.began - earlier.began for earlier, later in itertools.pairwise(traces)]
        rest = [seconds * 1e3 - part["start"] - part["pipe"] for seconds, part in zip(whole, parts[:-1], strict=True)]
        return {**found, "update": statistics.median(rest)}

    def _figures(self) -> dict[str, Any]:
        self._check_losses()
        size = self._workload.batch_size
        steps = {name: [seconds for one in rounds for seconds in one] for name, rounds in self._step_s.items()}
        return {
            "batch_size": size,
            "microbatches": self._microbatches,
            "parties": {
                name: {
                    "samples_per_s": spread(size / seconds for seconds in values),
                    "step_ms": spread(seconds * 1e3 for seconds in values),
                }
                for name, values in steps.items()
            },
            "ratios": {schedule: self._ratios(schedule) for schedule in SCHEDULES},
            "losses": {name: values[-1] for name, values in self._losses.items() if values},
            "halves_compute_ms": [spread(seconds * 1e3 for seconds in half) for half in self._compute_s],
            "lp_pipe_step_parts_ms": self._where,
        }

    def _ratios(self, schedule: str) -> dict[str, Any]:
        """Return ratios of throughputs, so that more is better."""
        ours, theirs = self._step_s[f"lp_pipe/{schedule}"], self._step_s[f"torch/{schedule}"]
        beside = {
            "single": self._step_s["single"],
            "limit": self._step_s["limit"],
            "own_limit": self._step_s[f"limit/{schedule}"],
        }
        return {
            **{f"lp_pipe_to_{name}": _ratio(step_s, ours) for name, step_s in beside.items()},
            "lp_pipe_to_torch": _ratio(theirs, ours),
            **{f"torch_to_{name}": _ratio(step_s, theirs) for name, step_s in beside.items()},
        }

    def _check_losses(self) -> None:
        """All parties did the same work, or their times cannot be compared."""
        reference = self._losses["single"]
        for name, losses in self._losses.items():
            # lp_pipe promises equal bits; torch adds in another order.
            tolerance = _TOLERANCE if name.startswith("torch/") else 0.0
            pairs = zip(reference, losses, strict=True) if losses else ()
            for step, (ours, theirs) in enumerate(pairs):
                if abs(ours - theirs) > tolerance * abs(ours):
                    raise SystemExit(
                        f"{self._workload.name}, step {step}: the single loop's loss is {ours}, {name}'s is {theirs}"
                    )


def _lp_pipe_party(client: pp.PipelineClient, first_step: int, steps: int) -> Turn:
    return lp_pipe_turn(client, steps)  # the pipeline itself counts the steps


def _ratio(theirs: list[list[float]], ours: list[list[float]]) -> dict[str, Any]:
    """Return how many times faster ours is, by each round's median step; "best" compares the fastest steps of all.

    On a machine that others use too, the fastest steps are those that nobody disturbed.
    """
    rounds = zip(theirs, ours, strict=True)
    ratios = spread(statistics.median(above) / statistics.median(below) for above, below in rounds)
    return {**ratios, "best": min(map(min, theirs)) / min(map(min, ours))}


def _parts(trace: pp.StepTrace) -> dict[str, float]:
    """Return a step's ms: until the first action, then what the busiest worker does until the last one.

    It computes; is before its first action or behind its last one (the bubble's ends); or between two actions, where it
    sends, receives and waits.
    """
    spans = max(trace.workers, key=lambda worker: sum(end - start for _, start, end in worker))
    begin = min(worker[0][1] for worker in trace.workers)
    finish = max(worker[-1][2] for worker in trace.workers)
    busy = sum(end - start for _, start, end in spans)
    between = spans[-1][2] - spans[0][1] - busy
    return {
        "start": (begin - trace.began) * 1e3,
        "compute": busy * 1e3,
        "ends": (finish - begin - busy - between) * 1e3,
        "between": between * 1e3,
        "between_us_an_action": between / (len(spans) - 1) * 1e6,
        "pipe": (finish - begin) * 1e3,
    }


def show(name: str, figures: dict[str, Any]) -> None:
    size, microbatches = figures["batch_size"], figures["microbatches"]
    parties = figures["parties"]
    rows = [
        [party, _cell(item["samples_per_s"], ".0f"), _cell(item["step_ms"], ".1f")] for party, item in parties.items()
    ]
    title = f"{name}: batches of {size} in {microbatches} micro-batches, 2 stages, 1 thread each; median (min–max)"
    show_table(title, ["", "samples/s", "ms a step"], rows)

    ratios = figures["ratios"]
    rows = [
        [f"{engine}/{schedule}", *(_cell(ratios[schedule].get(f"{engine}_to_{other}")) for other in _OTHERS)]
        for schedule in ratios
        for engine in ("lp_pipe", "torch")
    ]
    columns = ["", *(f"… {other}" for other in _OTHERS.values())]
    show_table(f"{name}: throughput as a multiple of …", columns, rows)

    parts = figures["lp_pipe_step_parts_ms"]
    names = ["start", "compute", "ends", "between", "between_us_an_action", "pipe", "update"]
    rows = [[f"lp_pipe/{schedule}", *(f"{parts[schedule][part]:.2f}" for part in names)] for schedule in parts]
    halves = ", ".join(_cell(half, ".1f") for half in figures["halves_compute_ms"])
    rows.append(["each half alone", "", halves, *[""] * (len(names) - 2)])
    columns = ["median", "start", "compute", "bubble's ends", "between actions", "µs an action", "pipe", "update"]
    show_table(f"{name}: where a step goes, ms, on its busiest worker (pipe: its parts' sum)", columns, rows)


def _cell(values: dict[str, Any] | None, form: str = ".2f") -> str:
    if values is None:
        return ""
    best = f", best {values['best']:{form}}" if "best" in values else ""
    return f"{values['median']:{form}} ({values['min']:{form}}–{values['max']:{form}}){best}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help=f"names, with commas: {','.join(MODELS)}")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps of each party in a round")
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--quick", action="store_true", help="tiny models, few steps: only to see that it works")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    workloads = QUICK_MODELS if options.quick else MODELS
    steps, repeats = (2, 2) if options.quick else (options.steps, options.repeats)
    names = options.models.split(",") if options.models else list(workloads)
    if unknown := set(names) - workloads.keys():
        parser.error(f"--models: {', '.join(sorted(unknown))}: known are {', '.join(workloads)}")
    figures: dict[str, Any] = {
        "benchmark": "pipeline",
        "machine": {**machine(), "torch": torch.__version__},
        "settings": {"steps": steps, "repeats": repeats, "stages": 2, "threads": 1, "channel": "shm"},
        "models": {},
    }
    for name in names:
        figures["models"][name] = Comparison(workloads[name], options.microbatches, steps).run(repeats)
        show(name, figures["models"][name])
    write_json(figures, options.json)


if __name__ == "__main__":
    main()
