"""Searchers: which trial runs until which step, as pure functions of the committed rows.

A searcher keeps no state. So its decisions depend only on the rows, and a restarted one goes on by reading them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

from lp_pipe.search.space import Params, draw, grid

Brackets = Literal["aggressive", "standard", "conservative"]
Outcome = Literal["", "finished", "stopped", "failed", "invalid"]
_MAX_RUNGS = 5


@dataclass(frozen=True)
class TrialRows:
    """The committed part of one trial.

    values: of the searcher's metric, by step. step: the newest with a row, of any metric.
    outcome: how its own code ended: "" while it has not, "finished" if it returned before its last step, "failed", or
        "invalid": its parameters cannot be tried (InvalidParams). "stopped": it was killed by a user.
    """

    values: Mapping[int, float] = field(default_factory=dict)
    step: int = 0
    outcome: Outcome = ""


_NOTHING = TrialRows()


@dataclass(frozen=True)
class Rows:
    """All that is committed, as far as it decides anything.

    trials: by id; those that never started are left out. reports: (trial, step) in commit order.
    """

    trials: Mapping[int, TrialRows] = field(default_factory=dict)
    reports: Sequence[tuple[int, int]] = ()

    def of(self, trial: int) -> TrialRows:
        return self.trials.get(trial, _NOTHING)


class Assigned(NamedTuple):
    """A trial that should run, and the step at which it ends or waits for a decision; None: when its code returns."""

    trial: int
    until_step: int | None


class Searcher(Protocol):
    """A rule that says which trials run, and for how long.

    metric: the name of the reported number that decides; None if none does. mode: "min" or "max", which value is best.
    max_steps: of a trial that nothing stops; None: until its code returns.
    """

    @property
    def metric(self) -> str | None: ...

    @property
    def mode(self) -> str: ...

    @property
    def max_steps(self) -> int | None: ...

    @property
    def size(self) -> int:
        """The number of trials, without those that replace invalid ones."""

    @property
    def sampler(self) -> Any:
        """What draws parameters: "random", "tpe", "cmaes", or an Optuna sampler."""

    def next(self, rows: Rows, running: Iterable[int] = ()) -> list[Assigned]:
        """Return the trials that should run now and are not `running`, the most urgent first."""

    def target(self, rows: Rows, trial: int) -> int | None:
        """Return the step until which this trial runs, as far as the rows decide it; None: when its code returns."""

    def may_go_on(self, rows: Rows, trial: int) -> bool:
        """Return whether rows that are still to come could let this trial run further than it has."""

    def params(self, space: Mapping[str, Any], seed: int, trial: int) -> Params:
        """Return the parameters of a trial."""

    def preview(self) -> dict[int, int]:
        """Return how many trials end at each step, if none fails."""


class _EachToItsEnd:
    """The rule of searchers that run every trial to `max_steps`."""

    max_steps: int | None
    sampler: Any = "random"

    @property
    def size(self) -> int:
        """The number of trials."""
        raise NotImplementedError

    def next(self, rows: Rows, running: Iterable[int] = ()) -> list[Assigned]:
        """Return the trials that should run now and are not `running`, in the order of their ids."""
        busy = set(running)
        trials = sorted(_trial_at(rows, place, self.size) for place in range(self.size))
        open_ones = (trial for trial in trials if _is_open(rows.of(trial), self.max_steps))
        return [Assigned(trial, self.max_steps) for trial in open_ones if trial not in busy]

    def target(self, rows: Rows, trial: int) -> int | None:
        return self.max_steps

    def may_go_on(self, rows: Rows, trial: int) -> bool:
        return _is_open(rows.of(trial), self.max_steps)

    def params(self, space: Mapping[str, Any], seed: int, trial: int) -> Params:
        return draw(space, seed, trial)

    def preview(self) -> dict[int, int]:
        return {self.max_steps or 0: self.size}


@dataclass(frozen=True)
class Single(_EachToItsEnd):
    """A single trial. It runs to `max_steps`, or until its code returns."""

    max_steps: int | None = None
    metric: str | None = None
    mode: str = "min"

    @property
    def size(self) -> int:
        return 1


@dataclass(frozen=True)
class Random(_EachToItsEnd):
    """Trials with drawn parameters, each to `max_steps`.

    sampler: "random": parameters follow from the seed and the trial's id. "tpe", "cmaes" or an Optuna sampler: they
        follow from the seed, the id, and the rows that are committed when the trial starts.
    """

    metric: str
    max_trials: int
    max_steps: int
    mode: str = "min"
    sampler: Any = field(default="random", compare=False)  # Optuna's have no equality; the definition names it

    def __post_init__(self) -> None:
        """Raises:
        ValueError: a number is below 1, or `mode` is neither "min" nor "max".
        """
        _check("Random", self.mode, max_trials=self.max_trials, max_steps=self.max_steps)

    @property
    def size(self) -> int:
        return self.max_trials


@dataclass(frozen=True)
class Grid(_EachToItsEnd):
    """A trial for each combination of the values in the space, each to `max_steps`."""

    metric: str
    max_steps: int
    mode: str = "min"
    combinations: tuple[Params, ...] = field(default=(), repr=False)  # once the experiment has given the space

    def __post_init__(self) -> None:
        """Raises:
        ValueError: `max_steps` is below 1, or `mode` is neither "min" nor "max".
        """
        _check("Grid", self.mode, max_steps=self.max_steps)

    @property
    def size(self) -> int:
        return len(self.combinations)

    def over(self, space: Mapping[str, Any]) -> "Grid":
        """Return this searcher for the combinations of the space.

        Raises:
            ValueError: a parameter has infinitely many values.
        """
        return replace(self, combinations=tuple(grid(space)))

    def next(self, rows: Rows, running: Iterable[int] = ()) -> list[Assigned]:
        """Return the combinations to run that are not `running`; no other one replaces one that is invalid."""
        busy = set(running)
        return [
            Assigned(trial, self.max_steps)
            for trial in range(self.size)
            if trial not in busy and _is_open(rows.of(trial), self.max_steps)
        ]

    def params(self, space: Mapping[str, Any], seed: int, trial: int) -> Params:
        return self.combinations[trial % self.size]


@dataclass(frozen=True)
class Halving:
    """Successive halving: of the trials in a rung, the best 1/`divisor` go on to the next, which is longer.

    A trial is promoted as soon as no report that is still to come can push it out of its rung's best. So there is no
    barrier, and yet exactly the same trials survive, after exactly the same steps, as with synchronous successive
    halving (Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", 2016,
    algorithm 1). eager=True promotes by the reports there are: ASHA (Li et al., arXiv 1810.05934, algorithm 2), on rows
    in commit order.

    min_steps: the first rung; the others follow at min_steps·divisor^k. None: the last rung is at max_steps, the others
        at max_steps/divisor^k, at most five.
    brackets: "aggressive" is one bracket with all rungs; "standard" and "conservative" add brackets with fewer rungs,
        in which trials run longer before they are judged (Hyperband; the modes and their sizes are Determined AI's).

    sampler: as for `Random`.

    Ties go to the lower trial id. A trial that failed or reported NaN ranks last and is never promoted. A trial that
    returned early keeps the rank of its last value.
    """

    metric: str
    max_trials: int
    max_steps: int
    divisor: int = 4
    min_steps: int | None = None
    mode: str = "min"
    brackets: Brackets = "aggressive"
    eager: bool = False
    sampler: Any = field(default="random", compare=False)  # Optuna's have no equality; the definition names it

    def __post_init__(self) -> None:
        """Raises:
        ValueError: a number is out of range, or `mode` or `brackets` is not one of its values.
        """
        _check("Halving", self.mode, max_trials=self.max_trials, max_steps=self.max_steps)
        if self.divisor < 2:
            raise ValueError(f"Halving: divisor must be at least 2, got divisor={self.divisor}")
        if self.min_steps is not None and not 1 <= self.min_steps <= self.max_steps:
            raise ValueError(f"Halving: min_steps must be 1 to max_steps={self.max_steps}, got {self.min_steps}")
        if self.brackets not in ("aggressive", "standard", "conservative"):
            known = "aggressive, standard, conservative"
            raise ValueError(f"Halving: brackets must be one of {known}, got {self.brackets!r}")

    @property
    def size(self) -> int:
        return self.max_trials

    def next(self, rows: Rows, running: Iterable[int] = ()) -> list[Assigned]:
        """Return the trials that should run now and are not `running`: those of the longest rungs first, then by id."""
        busy = set(running)
        works: list[tuple[int, int, Assigned]] = []
        for bracket in self._brackets:
            for trial, rung in self._rungs_of(bracket, rows).items():
                until = bracket.steps[rung]
                if trial not in busy and _is_open(rows.of(trial), until):
                    works.append((-rung, trial, Assigned(trial, until)))
        return [work for _, _, work in sorted(works)]

    def target(self, rows: Rows, trial: int) -> int | None:
        """Return the step of the highest rung that this trial has reached so far."""
        bracket = self._bracket_of(trial)
        return bracket.steps[self._rungs_of(bracket, rows).get(trial, 0)]

    def may_go_on(self, rows: Rows, trial: int) -> bool:
        """Return whether this trial has not reached its rung, or may still be promoted from it."""
        bracket = self._bracket_of(trial)
        rung = self._rungs_of(bracket, rows).get(trial)
        if rung is None or rows.of(trial).outcome:
            return False
        if _is_open(rows.of(trial), bracket.steps[rung]):
            return True
        if rung + 1 == len(bracket.steps):
            return False
        if self.eager:
            return True  # later reports widen the rung's best
        better = self._ranking(bracket, rows, rung)
        return trial in better[: self._size(bracket, rung + 1)]

    def params(self, space: Mapping[str, Any], seed: int, trial: int) -> Params:
        return draw(space, seed, trial)

    def preview(self) -> dict[int, int]:
        ends: dict[int, int] = {}
        for bracket in self._brackets:
            sizes = [self._size(bracket, rung) for rung in range(len(bracket.steps))]
            for step, size, next_size in zip(bracket.steps, sizes, [*sizes[1:], 0], strict=True):
                ends[step] = ends.get(step, 0) + size - next_size
        return dict(sorted((step, count) for step, count in ends.items() if count))

    @cached_property
    def _brackets(self) -> tuple["_Bracket", ...]:
        steps = self._rung_steps()
        most = len(steps)
        fewest = {"aggressive": most, "standard": (most - 1) // 2 + 1, "conservative": 1}[self.brackets]
        rungs = list(range(most, fewest - 1, -1))
        brackets, first = [], 0
        for count, size in zip(rungs, self._sizes(rungs), strict=True):
            brackets.append(_Bracket(range(first, first + size), steps[most - count :]))
            first += size
        return tuple(bracket for bracket in brackets if bracket.places)

    def _rung_steps(self) -> tuple[int, ...]:
        if self.min_steps is not None:
            steps = [self.min_steps]
            while steps[-1] * self.divisor < self.max_steps:
                steps.append(steps[-1] * self.divisor)
            return tuple(steps if steps[-1] == self.max_steps else [*steps, self.max_steps])
        count = 1 + min(
            _MAX_RUNGS - 1, _floor_log(self.max_steps, self.divisor), _floor_log(self.max_trials, self.divisor)
        )
        steps = [max(1, self.max_steps // self.divisor ** (count - 1 - rung)) for rung in range(count)]
        return tuple(sorted(set(steps)))

    def _sizes(self, rungs: Sequence[int]) -> list[int]:
        """Return each bracket's number of trials, such that all brackets run about the same number of steps."""
        weights = [self.divisor ** (count - 1) / count for count in rungs]
        sizes = [max(1, int(weight / sum(weights) * self.max_trials)) for weight in weights]
        sizes[0] += self.max_trials - sum(sizes)
        while sizes[0] < 1:  # fewer trials than brackets
            sizes.pop()
            sizes[0] += 1
        return sizes + [0] * (len(rungs) - len(sizes))

    def _size(self, bracket: "_Bracket", rung: int) -> int:
        return len(bracket.places) // int(self.divisor**rung)

    def _bracket_of(self, trial: int) -> "_Bracket":
        place = trial % self.max_trials
        return next(bracket for bracket in self._brackets if place in bracket.places)

    def _rungs_of(self, bracket: "_Bracket", rows: Rows) -> dict[int, int]:
        """Return the highest rung into which each trial of the bracket was promoted."""
        if self.eager:
            return self._eager_rungs(bracket, rows)
        rungs = dict.fromkeys(self._trials_of(bracket, rows), 0)
        expected = len(rungs)  # how many trials will at last be in the rung
        for rung in range(len(bracket.steps) - 1):
            entered = [trial for trial in rungs if rungs[trial] == rung]
            reported = [trial for trial in entered if self._has_reported(bracket, rows, trial, rung)]
            to_come = expected - len(reported)
            best = self._ranking(bracket, rows, rung, among=reported)
            room = self._size(bracket, rung + 1)
            for trial in best[: max(0, room - to_come)]:
                rungs[trial] = rung + 1
            expected = min(room, len(best) + to_come)
        return rungs

    def _eager_rungs(self, bracket: "_Bracket", rows: Rows) -> dict[int, int]:
        """Replay the reports in commit order; each may promote trials of its rung."""
        rungs = dict.fromkeys(self._trials_of(bracket, rows), 0)
        heights = {step: rung for rung, step in enumerate(bracket.steps[:-1])}
        reported: list[list[int]] = [[] for _ in heights]
        for trial, step in rows.reports:
            if trial not in rungs or step not in heights:
                continue
            rung = heights[step]
            reported[rung].append(trial)
            best = self._ranking(bracket, rows, rung, among=reported[rung])
            for promoted in best[: len(reported[rung]) // self.divisor]:
                rungs[promoted] = max(rungs[promoted], rung + 1)
        return rungs

    def _trials_of(self, bracket: "_Bracket", rows: Rows) -> list[int]:
        return [_trial_at(rows, place, self.max_trials) for place in bracket.places]

    def _has_reported(self, bracket: "_Bracket", rows: Rows, trial: int, rung: int) -> bool:
        found = rows.of(trial)
        return bool(found.outcome) or bracket.steps[rung] in found.values

    def _ranking(self, bracket: "_Bracket", rows: Rows, rung: int, among: Iterable[int] | None = None) -> list[int]:
        """Return the trials that have reported in this rung, the best first, without those that are never promoted."""
        sign = 1.0 if self.mode == "min" else -1.0
        ranked = []
        for trial in self._trials_of(bracket, rows) if among is None else among:
            found = rows.of(trial)
            value = found.values.get(bracket.steps[rung], math.nan)
            if found.outcome == "finished" and found.values and bracket.steps[rung] not in found.values:
                value = found.values[max(found.values)]
            is_out = found.outcome in ("failed", "stopped") and bracket.steps[rung] not in found.values
            if not math.isnan(value) and not is_out:
                ranked.append((sign * value, trial))
        return [trial for _, trial in sorted(ranked)]


@dataclass(frozen=True)
class _Bracket:
    """Trials that are compared with each other. places: of its trials. steps: its rungs, the last at max_steps."""

    places: range
    steps: tuple[int, ...]


def _trial_at(rows: Rows, place: int, count: int) -> int:
    """Return the id of the trial in this place; each invalid one is replaced by the id that is `count` larger.

    So the new id does not depend on when the other one was found to be invalid.
    """
    trial = place
    while rows.of(trial).outcome == "invalid":
        trial += count
    return trial


def _is_open(found: TrialRows, until_step: int | None) -> bool:
    """Return whether a trial has steps to run until this one."""
    return not found.outcome and (until_step is None or found.step < until_step)


def _floor_log(number: int, base: int) -> int:
    exponent = 0
    while base ** (exponent + 1) <= number:
        exponent += 1
    return exponent


def _check(what: str, mode: str, **numbers: int) -> None:
    for name, number in numbers.items():
        if int(number) != number or number < 1:
            raise ValueError(f"{what}: {name} must be a whole number from 1 on, got {name}={number!r}")
    if mode not in ("min", "max"):
        raise ValueError(f"{what}: mode must be 'min' or 'max', got mode={mode!r}")
