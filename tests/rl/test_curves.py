"""The interquartile mean leaves out outer quarters, its interval covers the truth, a run has a curve."""

import json
from pathlib import Path

import numpy as np
import pytest

import lp_pipe.rl as rl


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end() -> None:
    assert rl.iqm([1_000.0, 1.0, 2.0, -1_000.0]).value == 1.5
    assert rl.iqm([[0.0, 8.0], [2.0, 4.0]]).value == 3.0
    assert rl.iqm([5.0]) == (5.0, 5.0, 5.0)
    for wrong in ([], [1.0, float("nan")]):
        with pytest.raises(ValueError):
            rl.iqm(wrong)


def test_its_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    numbers = np.random.default_rng(3)
    truth = 2.0
    estimates = [rl.iqm(numbers.normal(truth, 1.0, size=(10, 3)), resamples=200) for _ in range(300)]
    covered = sum(one.low <= truth <= one.high for one in estimates) / len(estimates)
    assert 0.88 <= covered <= 0.99
    assert rl.iqm([1.0, 2.0, 3.0]) == rl.iqm([1.0, 2.0, 3.0]) != rl.iqm([1.0, 2.0, 3.0], confidence=0.5)


def test_a_curve_over_seeds_takes_each_runs_newest_score() -> None:
    curves = [[(10, 1.0), (20, 3.0)], [(12, 2.0)]]
    found = [(place, estimate.value) for place, estimate in rl.iqm_curve(curves, [5, 11, 12, 20, 30])]
    assert found == [(12, 1.5), (20, 2.5), (30, 2.5)]


def test_a_runs_curve_is_over_steps_and_time(tmp_path: Path) -> None:
    def row(time: float, **values: float) -> str:
        return json.dumps({"time": time, "node": "evaluator/0", "step": 1, "values": values}) + "\n"

    (tmp_path / "events.jsonl").write_text('{"time": 100.0, "event": "start"}\n')
    lines = [row(103.5, **{"evaluator/return": 2.0, "env_steps": 20}), row(102.0, loss=1.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"time": 1')
    assert rl.run_curve(tmp_path) == [(20, 3.5, 2.0)]
    with pytest.raises(ValueError, match="loss"):
        rl.run_curve(tmp_path, "entropy")
