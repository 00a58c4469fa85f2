"""The search over digits ends with a good network, and its page runs as it is printed."""

from pathlib import Path

import pytest

import lp_pipe as lp
import lp_pipe.search as ls
from examples import search_digits

pytest.importorskip("sklearn")


def test_the_best_of_a_few_trials_learns_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LP_PIPE_RUNS", str(tmp_path))
    lp.launch(search_digits.make_program(trials=8, epochs=4), "thread").wait(120.0)
    found = ls.open("search_digits")
    best = found.best()
    assert best is not None and best.checkpoint is not None
    accuracy = max(row.value for row in found.rows() if row.name == "accuracy" and row.trial == best.trial)
    assert accuracy > 0.8
