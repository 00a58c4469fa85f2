"""Searchers decide by the committed rows alone, and halving keeps the survivors of the synchronous algorithm."""

import math
import random
from collections.abc import Callable

import pytest

import lp_pipe.search as ls
from lp_pipe.search.searchers import Rows, Searcher, TrialRows
from tests.seeds import random_numbers

Curve = Callable[[int, int], float]  # (trial, step) -> the reported value


def finished(
    searcher: Searcher, curve: Curve, slots: int, order: random.Random, failing: frozenset[int] = frozenset()
) -> Rows:
    """Run trials to the end, the next report from any slot; `failing` trials fail at their first step."""
    trials: dict[int, TrialRows] = {}
    reports: list[tuple[int, int]] = []
    running: dict[int, int | None] = {}
    while True:
        rows = Rows(trials, reports)
        for trial, until in searcher.next(rows, running)[: slots - len(running)]:
            running[trial] = until
        if not running:
            return rows
        trial = order.choice(sorted(running))
        before = rows.of(trial)
        if trial in failing:
            trials[trial] = TrialRows(before.values, before.step, "failed")
            del running[trial]
            continue
        step = before.step + 1
        trials[trial] = TrialRows({**before.values, step: curve(trial, step)}, step)
        reports.append((trial, step))
        if step == running[trial]:  # the decision can only change at the end of a rung
            running[trial] = searcher.target(Rows(trials, reports), trial)
        if step == running[trial]:
            del running[trial]


def synchronous_halving(
    trials: range, steps: tuple[int, ...], divisor: int, curve: Curve, failing: frozenset[int]
) -> dict[int, int]:
    """The algorithm as published, with a barrier at each rung: the last step of each trial."""
    ends = dict.fromkeys(trials, 0)
    survivors = list(trials)
    for rung, step in enumerate(steps):
        alive = [trial for trial in survivors if trial not in failing and not math.isnan(curve(trial, step))]
        ends |= {trial: step for trial in survivors if trial not in failing}
        survivors = sorted(alive, key=lambda trial: (curve(trial, step), trial))[: len(trials) // divisor ** (rung + 1)]
    return ends


@pytest.mark.parametrize("slots", [1, 2, 4, 16])
def test_halving_keeps_the_survivors_of_the_synchronous_algorithm(slots: int) -> None:
    order = random_numbers(slots)
    for case in range(6):
        values: dict[int, float] = {}

        def curve(trial: int, step: int, values: dict[int, float] = values, order: random.Random = order) -> float:
            value = values.setdefault(trial, order.choice([*range(8), math.nan]))
            return value / step

        searcher = ls.Halving("loss", max_trials=64, max_steps=16, divisor=4)
        failing = frozenset(order.sample(range(64), case % 3))
        rows = finished(searcher, curve, slots, order, failing)
        expected = synchronous_halving(range(64), (1, 4, 16), 4, curve, failing)
        assert {trial: found.step for trial, found in rows.trials.items()} == expected
        assert not any(searcher.may_go_on(rows, trial) for trial in range(64))


def test_eager_halving_promotes_by_the_reports_there_are() -> None:
    searcher = ls.Halving("loss", max_trials=16, max_steps=4, divisor=4, eager=True)
    one = Rows({trial: TrialRows({1: float(trial)}, 1) for trial in (3, 5, 7)}, [(3, 1), (5, 1), (7, 1)])
    assert searcher.target(one, 3) == 1
    four = Rows({**one.trials, 9: TrialRows({1: 9.0}, 1)}, [*one.reports, (9, 1)])
    assert searcher.target(four, 3) == 4 and searcher.target(four, 5) == 1
    assert searcher.next(four)[0] == (3, 4)


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({"max_trials": 64, "max_steps": 16}, {1: 48, 4: 12, 16: 4}),
        ({"max_trials": 64, "max_steps": 16, "min_steps": 4}, {4: 48, 16: 16}),
        ({"max_trials": 3, "max_steps": 16}, {16: 3}),
        ({"max_trials": 100, "max_steps": 1}, {1: 100}),
        ({"max_trials": 16, "max_steps": 10, "min_steps": 1, "divisor": 3}, {1: 11, 3: 4, 9: 1}),
    ],
)
def test_the_preview_says_where_trials_end(options: dict[str, int], ends: dict[int, int]) -> None:
    searcher = ls.Halving("loss", **options)  # type: ignore[arg-type]
    rows = finished(searcher, lambda trial, step: float(trial), 4, random.Random(0))
    counted: dict[int, int] = {}
    for found in rows.trials.values():
        counted[found.step] = counted.get(found.step, 0) + 1
    assert searcher.preview() == dict(sorted(counted.items()))
    assert sum(searcher.preview().values()) == options["max_trials"]


@pytest.mark.parametrize("brackets", ["aggressive", "standard", "conservative"])
def test_every_trial_is_in_one_bracket(brackets: str) -> None:
    for max_trials in (1, 2, 5, 65):
        searcher = ls.Halving("loss", max_trials=max_trials, max_steps=64, brackets=brackets)  # type: ignore[arg-type]
        assert sum(searcher.preview().values()) == max_trials
        rows = finished(searcher, lambda trial, step: -float(trial), 8, random.Random(1))
        assert len(rows.trials) == max_trials
        assert max(found.step for found in rows.trials.values()) == 64


def test_an_invalid_trial_is_replaced_by_an_id_that_does_not_depend_on_time() -> None:
    searcher = ls.Random("loss", max_trials=4, max_steps=2)
    rows = Rows({1: TrialRows(outcome="invalid"), 5: TrialRows(outcome="invalid"), 0: TrialRows({1: 0.5, 2: 0.4}, 2)})
    assert [work.trial for work in searcher.next(rows, running=[2])] == [3, 9]


def test_a_grid_has_one_trial_for_each_combination() -> None:
    space = {"width": ls.choice(8, 16), "opt": {"depth": ls.integer(1, 3), "name": "adam"}}
    searcher = ls.Grid("loss", max_steps=5).over(space)
    assert searcher.size == 6 and searcher.params(space, 0, 4) == {"width": 16, "opt": {"depth": 2, "name": "adam"}}
    with pytest.raises(ValueError, match=r"opt\.lr"):
        ls.Grid("loss", max_steps=5).over({"opt": {"lr": ls.log(1e-4, 1.0)}})


def test_parameters_follow_from_seed_and_trial() -> None:
    space = {"lr": ls.log(1e-4, 1.0), "layers": ls.integer(1, 3), "act": ls.choice("relu", "tanh"), "bias": True}
    drawn = [ls.Random("loss", 500, 1).params(space, 7, trial) for trial in range(500)]
    assert drawn == [ls.Halving("loss", 500, 1).params(space, 7, trial) for trial in range(500)]
    assert {values["layers"] for values in drawn} == {1, 2, 3}
    assert all(1e-4 <= values["lr"] <= 1.0 and values["bias"] is True for values in drawn)
    assert abs(sum(values["lr"] < 1e-2 for values in drawn) - 250) < 50


@pytest.mark.parametrize(
    "make",
    [
        lambda: ls.Halving("loss", 0, 4),
        lambda: ls.Halving("loss", 4, 4, divisor=1),
        lambda: ls.Halving("loss", 4, 4, mode="least"),
        lambda: ls.Halving("loss", 4, 4, min_steps=5),
        lambda: ls.Random("loss", 1, 0),
        lambda: ls.uniform(1, 1),
        lambda: ls.log(0, 1),
        lambda: ls.integer(2, 1),
        lambda: ls.choice(),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"loss|min|max|least|number|value|above|divisor"):
        make()
