"""Scores over several seeds: their interquartile mean with intervals; curves over steps and time. Needs no torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lp_pipe.rl.tree import Array


class Estimate(NamedTuple):
    """A value with the interval of a confidence level."""

    value: float
    low: float
    high: float


class CurvePoint(NamedTuple):
    """A score of a run. wall_s: seconds since the run began."""

    env_steps: int
    wall_s: float
    value: float


def iqm(scores: Any, confidence: float = 0.95, resamples: int = 2_000, seed: int = 0) -> Estimate:
    """Return the interquartile mean of scores with the interval of a bootstrap over runs.

    scores: [runs], or [runs, tasks], where runs are resampled for each task by itself. The lowest and the highest
    quarter are left out. Source: Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice"
    (2021), section 4.3.

    Raises:
        ValueError: there are no scores, one is NaN, or the confidence is not between 0 and 1.
    """
    table = np.asarray(scores, dtype=np.float64)
    table = table[:, None] if table.ndim == 1 else table
    if table.ndim != 2 or not table.size or np.isnan(table).any() or not 0.0 < confidence < 1.0:
        raise ValueError(
            f"iqm: scores must be [runs] or [runs, tasks] without NaN and confidence between 0 and 1, got shape "
            f"{np.shape(scores)} with {int(np.isnan(table).sum())} NaN, and {confidence}"
        )
    runs, tasks = table.shape
    chosen = np.random.default_rng(seed).integers(runs, size=(resamples, runs, tasks))
    drawn = _middle_mean(table[chosen, np.arange(tasks)].reshape(resamples, -1))
    low, high = np.quantile(drawn, [(1.0 - confidence) / 2.0, (1.0 + confidence) / 2.0])
    return Estimate(float(_middle_mean(table.reshape(1, -1))[0]), float(low), float(high))


def iqm_curve(
    curves: Sequence[Sequence[tuple[float, float]]], at: Sequence[float], confidence: float = 0.95
) -> list[tuple[float, Estimate]]:
    """Return the interquartile mean over runs at each place; a run counts with its newest score up to there.

    curves: of each run (place, score), such as `Result.curve`, in the order of places. Places before the first score of
    any run are left out; a run that ended keeps its last score.
    """
    found = []
    for place in at:
        newest = [[score for x, score in curve if x <= place][-1:] for curve in curves]
        if newest and all(newest):
            found.append((place, iqm([score for (score,) in newest], confidence)))
    return found


def run_curve(run_dir: Path | str, metric: str = "evaluator/return") -> list[CurvePoint]:
    """Return a metric of a run over environment steps and time, of a program or of `run_experiment`.

    Raises:
        FileNotFoundError: the folder is not a run's, or its run logged no metric.
        ValueError: no row has the metric.
    """
    folder = Path(run_dir)
    rows = _rows(folder / "metrics.jsonl")
    events = _rows(folder / "events.jsonl") if (folder / "events.jsonl").exists() else []  # of a program
    start = min(float(row["time"]) for row in [*events, *rows])
    points = [
        CurvePoint(int(row["values"]["env_steps"]), float(row["time"]) - start, float(row["values"][metric]))
        for row in rows
        if metric in row["values"] and "env_steps" in row["values"]
    ]
    if not points:
        names = sorted({name for row in rows for name in row["values"]})
        raise ValueError(f"run {folder.name} has no metric {metric!r} with env_steps; metrics: {', '.join(names)}")
    return sorted(points)


def _rows(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may not be whole yet


def _middle_mean(scores: Array) -> Array:
    """Return the mean of each row without its lowest and highest quarter, rounded down."""
    cut = scores.shape[1] // 4
    middle: Array = np.sort(scores, axis=1)[:, cut : scores.shape[1] - cut].mean(axis=1)
    return middle
