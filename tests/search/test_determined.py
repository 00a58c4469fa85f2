"""A Determined experiment file gives the space and the searcher of an experiment; the page for its users is right."""

import re
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
import lp_pipe.search as ls

pytest.importorskip("yaml")

FILE = """
name: mnist_adaptive
entrypoint: model_def:MNistTrial
max_restarts: 3
hyperparameters:
  global_batch_size: 64
  learning_rate: {type: log, base: 10, minval: -4, maxval: -1}
  filters: {type: int, minval: 8, maxval: 64, count: 3}
  dropout: {type: double, minval: 0.2, maxval: 0.8, count: 4}
  optimizer:
    name: {type: categorical, vals: [adam, sgd]}
    nesterov: {type: const, val: true}
searcher:
  name: SEARCHER
  metric: validation_loss
  smaller_is_better: true
  max_trials: 16
  max_length: {batches: 937}
  mode: aggressive
"""


def read(tmp_path: Path, searcher: str, text: str = FILE) -> dict[str, object]:
    (tmp_path / "experiment.yaml").write_text(text.replace("SEARCHER", searcher))
    return ls.from_yaml(tmp_path / "experiment.yaml")


def test_an_adaptive_search_is_halving_in_brackets(tmp_path: Path) -> None:
    found = read(tmp_path, "adaptive_asha")
    assert found["searcher"] == ls.Halving("validation_loss", 16, 937, divisor=4, brackets="aggressive")
    assert found["max_restarts"] == 3
    assert found["space"] == {
        "global_batch_size": 64,
        "learning_rate": ls.log(1e-4, 1e-1),
        "filters": ls.integer(8, 64),
        "dropout": ls.uniform(0.2, 0.8),
        "optimizer": {"name": ls.choice("adam", "sgd"), "nesterov": True},
    }


def test_the_other_searchers_keep_their_names(tmp_path: Path) -> None:
    assert read(tmp_path, "random")["searcher"] == ls.Random("validation_loss", 16, 937)
    assert read(tmp_path, "single")["searcher"] == ls.Single(937, "validation_loss")
    with pytest.raises(ValueError, match="custom"):
        read(tmp_path, "custom")


def test_a_grid_has_the_counted_points(tmp_path: Path) -> None:
    text = FILE.replace("  learning_rate: {type: log, base: 10, minval: -4, maxval: -1}\n", "")
    found = read(tmp_path, "grid", text)
    program = ls.experiment("grid", print, folder=tmp_path / "grid", **found)  # type: ignore[arg-type]
    assert ls.preview(program) == {937: 3 * 4 * 2}
    assert found["space"]["filters"] == ls.choice(8, 36, 64)  # type: ignore[index]


PAGE = Path(__file__).parent.parent.parent / "docs" / "coming_from_determined.md"


class Model:
    def __init__(self, lr: float) -> None:
        self.lr, self.steps = lr, 0

    def train_one(self) -> float:
        self.steps += 1
        return self.lr / self.steps

    def state_dict(self) -> int:
        return self.steps

    def load_state_dict(self, steps: int) -> None:
        self.steps = steps


def test_the_changed_trial_of_the_page_runs_as_an_experiment(tmp_path: Path) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    kept = [line[1:] for line in diff.splitlines() if line[0] in "+ "]
    assert len(kept) <= 10
    names: dict[str, Any] = {"Model": Model}
    exec("\n".join(kept), names)
    program = ls.experiment(
        "ported", names["trial"], space={"lr": 0.5}, searcher=ls.Single(3, "loss"), folder=tmp_path / "ported"
    )
    lp.launch(program, "thread").wait(30.0)
    assert ls.open(tmp_path / "ported").curves() == {0: [(1, 0.5), (2, 0.25), (3, 0.5 / 3)]}
