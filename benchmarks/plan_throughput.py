"""A deliberately unbalanced model: the automatic plan beside all hand cuts, and what was predicted beside what came.

Every cut of the model into so many stages is a pipeline of processes. They take turns, round after round, so that a
busy machine slows all of them; the plan's cut is one of them. It comes from a profile that is taken before. In each
round there are new profiles for the prediction: what a machine gives changes while a benchmark runs.

"sleeping" layers need no cores, so that several stages really run at once here. "computing" ones need a core each, and
share what cores share: their plan is made from a profile with as many busy processes as stages, and what a profile of
one process alone would predict stands beside it.
"""

import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from benchmarks.report import show_table, spread
from benchmarks.sleeping import Sleeper, Start, mean, sgd
from lp_pipe.pipeline.partitioning.step_time import StageTiming, step_seconds

GOAL_OF_BEST, GOAL_OVER_EQUAL, GOAL_PREDICTION = 0.97, 1.2, 0.10
_BANDWIDTH, _LATENCY_S = 5e9, 1e-4  # of a channel through shared memory, about
_WARMUP_STEPS = 2


class Case(NamedTuple):
    """A model in layers, its number of stages, and the size of its batches. busy: as in pp.profile."""

    layers: tuple[pp.Layer, ...]
    stages: int
    rows: int
    width: int
    microbatches: int
    busy: int

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.rows, self.width, generator=generator)
        return inputs, inputs[:, :1].contiguous()

    def model(self) -> pp.Model:
        return pp.Model(self.layers, mean, sgd)

    def cuts(self) -> list[tuple[int, ...]]:
        return list(itertools.combinations(range(1, len(self.layers)), self.stages - 1))

    def equal_cut(self) -> tuple[int, ...]:
        """Return cuts with as many layers in each stage as in the others, more or less."""
        return tuple(round(len(self.layers) * stage / self.stages) for stage in range(1, self.stages))


class Block(nn.Module):
    """A layer [B, D] -> [B, D], with an inner width of its own."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def cases(*, is_quick: bool) -> dict[str, Case]:
    """Return layers of which a few take most of the time, so that equal numbers of layers are far from equal stages."""
    unit_s = 0.001 if is_quick else 0.003
    sleeps, stages = ([1, 3], 2) if is_quick else ([1, 1, 1, 4, 4], 3)
    inner = [256, 64, 64] if is_quick else [1536, 768, 768, 128, 128, 128]
    rows = 64 if is_quick else 2048
    sleeping = (pp.Layer(Start), *(pp.Layer(Sleeper, unit_s * units) for units in sleeps))
    return {
        "sleeping": Case(sleeping, stages, 8, 256, 8, 1),
        "computing": Case(tuple(pp.Layer(Block, 256, size) for size in inner), 2, rows, 256, 8, 2),
    }


class Feeder:
    """A feeder of the same batch in every step."""

    def __init__(self, case: Case) -> None:
        self._batch = case.batch()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self._batch


@contextlib.contextmanager
def launched(case: Case, stages: Sequence[int], run_dir: str) -> Iterator[pp.PipelineClient]:
    """Return the model as a pipeline with this cut."""
    program = lp.Program("bench_plan")
    feeder = program.add_node(lp.CourierNode(Feeder, case), label="feeder")
    pipeline = pp.add_pipeline(
        program, case.model(), stages=stages, microbatches=case.microbatches, channel="shm", inputs=feeder
    )
    with lp.launch(program, "process", run_dir=run_dir) as run:
        yield run.client(pipeline)


def profiled(case: Case, busy: int) -> pp.Profile:
    """Return the seconds of one micro-batch."""
    sample_input, sample_target = (part.chunk(case.microbatches)[0] for part in case.batch())
    return pp.profile(case.model(), sample_input, sample_target, busy=busy)


def planned_cut(case: Case, profile: pp.Profile) -> tuple[int, ...]:
    topology = pp.Topology([pp.Level("process", case.stages, _BANDWIDTH, _LATENCY_S)])
    plan = pp.partition(profile, topology, straight=True, microbatches=case.microbatches)
    return tuple(plan.cuts([layer.name for layer in profile.layers]))


def predicted_s(case: Case, profile: pp.Profile, cut: Sequence[int]) -> float:
    """Return the seconds of a step, as `partition` predicts it for its plan."""
    ends = itertools.pairwise([0, *cut, len(profile.layers)])
    stages = [
        StageTiming(
            sum(layer.forward_s for layer in profile.layers[first:end]),
            sum(layer.backward_s for layer in profile.layers[first:end]),
            1,
            profile.layers[first - 1].activation_bytes / _BANDWIDTH + _LATENCY_S if first else 0.0,
            0.0,
        )
        for first, end in ends
    ]
    return step_seconds("1f1b", stages, case.microbatches)


def figures_of(case: Case, steps: int, rounds: int) -> dict[str, Any]:
    """Return the plan, the steps of all cuts, and the ratios that have goals."""
    profile = profiled(case, case.busy)
    ours = planned_cut(case, profile)
    taken: dict[tuple[int, ...], list[float]] = {cut: [] for cut in {*case.cuts(), ours, case.equal_cut()}}
    predicted: dict[int, list[float]] = {busy: [] for busy in {case.busy, 1}}
    with tempfile.TemporaryDirectory(prefix="lp-bench-") as folder, contextlib.ExitStack() as stack:
        clients = {
            cut: stack.enter_context(launched(case, cut, f"{folder}/{'-'.join(map(str, cut))}")) for cut in taken
        }
        for client in clients.values():
            _turn(client, _WARMUP_STEPS)
        for _ in range(rounds):
            for busy, seconds in predicted.items():
                seconds.append(predicted_s(case, profiled(case, busy), ours))
            for cut, client in clients.items():
                taken[cut].append(_turn(client, steps))
    best = min(taken, key=lambda cut: statistics.median(taken[cut]))
    return {
        "layers_ms": [(layer.forward_s + layer.backward_s) * 1e3 for layer in profile.layers],
        "busy": case.busy,
        "planned_cut": ours,
        "best_cut": best,
        "equal_cut": case.equal_cut(),
        "predicted_step_ms": spread(seconds * 1e3 for seconds in predicted[case.busy]),
        "step_ms": {
            "-".join(map(str, cut)): spread(seconds * 1e3 for seconds in values) for cut, values in taken.items()
        },
        "planned_to_best": _ratios(taken[best], taken[ours]),
        "planned_to_equal": _ratios(taken[case.equal_cut()], taken[ours]),
        "measured_to_predicted": _ratios(predicted[case.busy], taken[ours]),
        "measured_to_predicted_alone": _ratios(predicted[1], taken[ours]),
    }


def _turn(client: pp.PipelineClient, steps: int) -> float:
    """Return the median seconds of a step, of some steps."""
    started = time.monotonic()
    took = []
    for _ in client.steps(steps):
        ended = time.monotonic()
        took.append(ended - started)
        started = ended
    return statistics.median(took)


def _ratios(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Return how many times faster ours is, round by round; "best": in the fastest, undisturbed rounds."""
    ratios = spread(above / below for above, below in zip(theirs, ours, strict=True))
    return {**ratios, "best": min(theirs) / min(ours)}


def show(name: str, case: Case, figures: dict[str, Any]) -> None:
    rows = [
        ["planned / best of all cuts", _cell(figures["planned_to_best"]), f"at least {GOAL_OF_BEST}"],
        ["planned / equal numbers of layers", _cell(figures["planned_to_equal"]), f"at least {GOAL_OVER_EQUAL}"],
        ["measured / predicted", _cell(figures["measured_to_predicted"]), f"within {GOAL_PREDICTION:.0%} of 1"],
    ]
    if case.busy > 1:
        rows.append(["measured / predicted by a process alone", _cell(figures["measured_to_predicted_alone"]), ""])
    cuts = ", ".join(f"{key.partition('_')[0]} {figures[key]}" for key in ("planned_cut", "best_cut", "equal_cut"))
    title = f"{name}, {len(case.layers)} layers on {case.stages} stages, {len(figures['step_ms'])} cuts: {cuts}"
    show_table(title, ["throughput", "median (min–max), fastest", "goal"], rows)


def _cell(values: dict[str, Any]) -> str:
    return f"{values['median']:.3f} ({values['min']:.3f}–{values['max']:.3f}), best {values['best']:.3f}"
