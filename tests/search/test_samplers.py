"""Samplers that learn draw the same parameters from the same rows, also in a searcher that was restarted."""

import sys
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
import lp_pipe.search as ls
from lp_pipe.search.samplers import Sampled, suggest
from lp_pipe.search.searchers import Rows, TrialRows

SPACE = {"x": ls.uniform(0.0, 1.0), "opt": {"lr": ls.log(1e-4, 1.0), "act": ls.choice("relu", None), "fixed": 7}}
SPACE_OF_NUMBERS = {"x": ls.uniform(0.0, 1.0), "y": ls.uniform(0.0, 1.0), "n": ls.integer(1, 9)}


def loss(t: ls.Trial) -> None:
    for step in t.steps():
        t.report({"loss": (t.params["x"] - 0.3) ** 2 + 1.0 / step})


def stops_at_every_third_trial(t: ls.Trial) -> None:
    marker = t.folder / "stopped"
    if t.id % 3 == 1 and not marker.exists():
        t.folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
        lp.stop()
        lp.wait_for_stop()
        return
    loss(t)


@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "own"])
def test_a_restarted_searcher_draws_the_same_parameters(sampler: str, tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    pytest.importorskip("cmaes")
    chosen: Any = optuna.samplers.RandomSampler() if sampler == "own" else sampler
    drawn = {}
    for name, trial in (("undisturbed", loss), ("stopped", stops_at_every_third_trial)):
        for launch in range(8):
            searcher = ls.Random("loss", max_trials=18, max_steps=1, sampler=chosen)
            folder = tmp_path / name
            program = ls.experiment(name, trial, space=SPACE_OF_NUMBERS, searcher=searcher, folder=folder)
            lp.launch(program, "thread", run_dir=tmp_path / "run" / f"{name}-{launch}").wait(60.0)
            if ls.open(folder).is_over():
                break
        drawn[name] = [one.params for one in ls.open(folder).trials()]
        assert launch == (6 if name == "stopped" else 0)
    assert drawn["undisturbed"] == drawn["stopped"] and len(drawn["stopped"]) == 18
    assert len({one["x"] for one in drawn["stopped"]}) == 18


def test_suggestions_follow_what_was_reported() -> None:
    pytest.importorskip("optuna")
    searcher = ls.Halving("loss", max_trials=64, max_steps=4, divisor=2, sampler="tpe")
    sampled: dict[int, Sampled] = {}
    trials: dict[int, TrialRows] = {}
    for trial in range(40):
        params, sampled[trial] = suggest(searcher, SPACE, 0, trial, Rows(trials), sampled)
        assert params["opt"]["act"] in ("relu", None) and params["opt"]["fixed"] == 7
        trials[trial] = TrialRows({1: abs(params["x"] - 0.3)}, 1, "failed" if trial % 10 == 9 else "")
    first, last = ([sampled[trial].values["x"] for trial in some] for some in (range(10), range(30, 40)))
    assert sum(abs(x - 0.3) for x in last) < sum(abs(x - 0.3) for x in first) / 2


def test_an_unknown_sampler_and_a_missing_optuna_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(sampler: str) -> lp.Program:
        searcher = ls.Random("loss", 1, 1, sampler=sampler)
        return ls.experiment("e", loss, space=SPACE, searcher=searcher, folder=tmp_path)

    with pytest.raises(ValueError, match="grid"):
        made("grid")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ModuleNotFoundError) as error:
        made("tpe")
    assert error.value.name == "optuna" and "lp_pipe[search]" in str(error.value)
