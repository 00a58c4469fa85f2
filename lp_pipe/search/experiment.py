"""An experiment: a program with a searcher and slots, and what can be read of it."""

import contextlib
import hashlib
import math
import pickle
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import cloudpickle

import lp_pipe as lp
from lp_pipe.errors import LaunchError
from lp_pipe.launch.run_dir import usual_runs
from lp_pipe.search.samplers import check_sampler, name_of
from lp_pipe.search.searcher_node import ExperimentSettings, Fork, Keep, SearcherNode
from lp_pipe.search.searchers import Grid, Random, Rows, Searcher, TrialRows
from lp_pipe.search.space import Constant, Params, dimensions, flat, nested
from lp_pipe.search.store import ExperimentFolder, Reading, TrialRecord, read_only, rows_in
from lp_pipe.search.trial import Trial, TrialSlot


@dataclass(frozen=True)
class _Definition:
    """The facts by which an experiment is the same one when it is launched again."""

    searcher: Searcher
    space: str
    code: str
    seed: int
    sampler: str


@dataclass(frozen=True)
class _Recipe:
    """The parts that a fork needs to run a trial of the experiment again."""

    trial: Callable[[Trial], Any]
    seed: int
    max_restarts: int
    resources: lp.Resources | None
    keep: Keep | None
    on_log: Mapping[str, str] | None


class ExperimentProgram(lp.Program):
    """The program of an experiment: an ordinary program that also knows its settings."""

    def __init__(self, name: str, settings: ExperimentSettings) -> None:
        super().__init__(name)
        self.settings = settings


def experiment(
    name: str,
    trial: Callable[[Trial], Any],
    *,
    space: Mapping[str, Any],
    searcher: Searcher,
    slots: int = 1,
    seed: int = 0,
    max_restarts: int = 5,
    resources: lp.Resources | None = None,
    keep: Keep | None = None,
    on_log: Mapping[str, str] | None = None,
    folder: Path | str | None = None,
) -> lp.Program:
    """Return a program that runs trials in `slots` nodes, as the searcher's node says.

    max_restarts: a trial fails when its slot dies more often in a row without a new row.
    on_log: regular expressions and what they mean: "fail" ends a trial for good that prints a line with this pattern.
    folder: of the experiment; default: experiments/NAME in the folder of all runs. Launching the program with the
        folder of an unfinished experiment goes on with it.

    Raises:
        ValueError: `slots` is below 1, a name in the space is no str, the space has no grid, or `on_log` has no valid
            pattern or another meaning than "fail".
        ModuleNotFoundError: the searcher's sampler needs Optuna, which is not installed.
        LaunchError: the folder has an experiment with another trial, space, searcher or seed.
    """
    if slots < 1:
        raise ValueError(f"experiment {name!r}: slots must be at least 1, got slots={slots}")
    if isinstance(searcher, Grid):
        searcher = searcher.over(space)
    check_sampler(searcher.sampler)
    patterns = _compiled(on_log or {})
    path = (Path(folder) if folder is not None else usual_runs() / "experiments" / name).absolute()
    definition = _Definition(searcher, repr(list(dimensions(space))), _digest(trial), seed, name_of(searcher.sampler))
    _check_is_same(path, definition)
    recipe = _Recipe(trial, seed, max_restarts, resources, keep, on_log)
    facts = {"definition": cloudpickle.dumps(definition), "recipe": _by_value(recipe)}
    settings = ExperimentSettings(path, searcher, dict(space), seed, slots, max_restarts, keep or Keep(), facts)
    return _program(name, settings, trial, resources, patterns)


def fork(
    parent: "Experiment", trial: int, changes: Mapping[str, Any] | None = None, *, from_checkpoint: bool = False
) -> lp.Program:
    """Return the program of a new experiment with one trial: the parent's, with some parameters changed.

    changes: new values by dotted name, such as {"opt.decay": 0.1}. from_checkpoint: the trial goes on from its newest
    checkpoint, with its rows until there.

    Raises:
        ValueError: there is no such trial or parameter, or no checkpoint to go on from.
    """
    facts, record, rows = parent._of_trial(trial)
    recipe: _Recipe = pickle.loads(facts["recipe"])
    values = flat(record.params)
    for name in changes or {}:
        if name not in values:
            raise ValueError(f"trial {trial} has no parameter {name!r}; it has {', '.join(values)}")
    if from_checkpoint and record.checkpoint is None:
        raise ValueError(f"trial {trial} of {parent.folder.name} has no checkpoint to go on from")
    searcher = parent._definition.searcher
    only = Random(searcher.metric or "", 1, searcher.max_steps or 1, searcher.mode)
    space = nested({name: Constant(value) for name, value in {**values, **(changes or {})}.items()})
    number = 1
    while (folder := parent.folder.with_name(f"{parent.folder.name}-fork-{number}")).exists():
        number += 1
    definition = _Definition(only, repr(list(dimensions(space))), _digest(recipe.trial), recipe.seed, "random")
    of_fork = {
        "definition": cloudpickle.dumps(definition),
        "recipe": _by_value(recipe),
    }
    settings = ExperimentSettings(
        folder,
        only,
        space,
        recipe.seed,
        1,
        recipe.max_restarts,
        recipe.keep or Keep(),
        of_fork,
        Fork(rows, record.checkpoint) if from_checkpoint and record.checkpoint else None,
    )
    return _program(folder.name, settings, recipe.trial, recipe.resources, _compiled(recipe.on_log or {}))


def _program(
    name: str,
    settings: ExperimentSettings,
    trial: Callable[[Trial], Any],
    resources: lp.Resources | None,
    patterns: Sequence[re.Pattern[str]],
) -> lp.Program:
    program = ExperimentProgram(name, settings)
    with program.group("searcher", on_failure="restart", max_restarts=None):
        node = lp.CourierNode(SearcherNode, settings, None)
        searcher_handle = program.add_node(node)
        node.configure(settings, searcher_handle)
    with program.group("slots", resources, on_failure="restart", max_restarts=None):
        for _ in range(settings.num_slots):
            # Slots get no calls. But the back-off of a node that has served begins anew, so that slots which are
            # killed now and then come back at once.
            slot = lp.CourierNode(TrialSlot, searcher_handle, trial, settings.folder, settings.seed, patterns)
            program.add_node(slot)
    return program


def preview(program: lp.Program) -> dict[int, int]:
    """Return, for an experiment's program, how many trials end at each step if none fails."""
    if not isinstance(program, ExperimentProgram):
        raise ValueError(f"program {program.name!r} is no experiment: ls.experiment makes one")
    return program.settings.searcher.preview()


class Best(NamedTuple):
    """The trial with the best value of all rows. checkpoint: the one of that step, if it was kept."""

    trial: int
    value: float
    params: Params
    checkpoint: Path | None


class TrialSummary(NamedTuple):
    """state: waiting, running, paused, finished, stopped, failed or invalid."""

    id: int
    params: Params
    state: str
    step: int
    attempts: int
    error: str | None
    checkpoint: Path | None


class ChangedDecision(NamedTuple):
    """A trial that has run to a step, although the searcher would have stopped it at `until_step` by the rows then."""

    trial: int
    step: int
    until_step: int


class Row(NamedTuple):
    """A reported number. time: seconds since the epoch."""

    trial: int
    step: int
    name: str
    value: float
    time: float
    attempt: int


class Experiment:
    """The committed part of an experiment, which may be running. Every method reads the file anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._definition = _definition_in(folder)

    @property
    def searcher(self) -> Searcher:
        """What decides which trials run, and until which step."""
        return self._definition.searcher

    def rows(self) -> list[Row]:
        """Return all rows in commit order."""
        with closing(read_only(self.folder)) as db:
            return [Row(*row) for row in rows_in(db)]

    def curves(self) -> dict[int, list[tuple[int, float]]]:
        """Return (step, value) of the searcher's metric for each trial, in the order of steps."""
        curves: dict[int, list[tuple[int, float]]] = {}
        for row in self.rows():
            if row.name == self._definition.searcher.metric:
                curves.setdefault(row.trial, []).append((row.step, row.value))
        return {trial: sorted(curve) for trial, curve in sorted(curves.items())}

    def trials(self) -> list[TrialSummary]:
        """Return every trial that has started, by id. After the end of its run a trial is not running, but waiting."""
        searcher = self._definition.searcher
        is_live = ExperimentFolder(self.folder).owner() is not None
        with closing(Reading(self.folder, searcher.metric)) as reading:
            rows, is_paused = reading.rows(), reading.is_paused()
            return [
                TrialSummary(
                    one.id,
                    one.params,
                    _state_of(one, searcher.may_go_on(rows, one.id), searcher.max_steps, is_live, is_paused),
                    one.newest,
                    one.attempt,
                    one.error,
                    Path(one.checkpoint[0]) if one.checkpoint else None,
                )
                for one in sorted(reading.trials.values(), key=lambda one: one.id)
            ]

    def replay(self) -> list[ChangedDecision]:
        """Decide again at each report, by what was committed before it; return what would be decided otherwise now.

        The list is empty, unless the file or the searcher's rule has changed.
        """
        searcher = self._definition.searcher
        trials: dict[int, TrialRows] = {}
        reports: list[tuple[int, int]] = []
        targets: dict[int, float] = {}
        changed = []
        with closing(Reading(self.folder, searcher.metric)) as reading:
            history = reading.history()
        for _, trial, step, value, outcome in history:
            known = trials.get(trial, TrialRows())
            if outcome:
                trials[trial] = replace(known, outcome=outcome)  # type: ignore[arg-type]  # of the query's names
                continue
            if step > targets.get(trial, 0):
                target = searcher.target(Rows(trials, reports), trial)
                targets[trial] = math.inf if target is None else target
                if target is not None and step > target:
                    changed.append(ChangedDecision(trial, step, target))
            values = {**known.values, step: math.nan if value is None else value}
            trials[trial] = TrialRows(values, max(step, known.step), known.outcome)
            if step not in known.values:  # else another attempt runs this step again
                reports.append((trial, step))
        return changed

    def steps_due(self) -> int:
        """Return how many steps all trials run in all, if none fails."""
        return sum(step * trials for step, trials in self._definition.searcher.preview().items())

    def is_over(self) -> bool:
        """Return whether no trial is left to run."""
        searcher = self._definition.searcher
        with closing(Reading(self.folder, searcher.metric)) as reading:
            return not searcher.next(reading.rows())

    def _of_trial(self, trial: int) -> tuple[dict[str, Any], TrialRecord, list[Row]]:
        """Return the experiment's facts, a trial's record, and its rows until its newest checkpoint."""
        with closing(Reading(self.folder, self._definition.searcher.metric)) as reading:
            record = reading.trials.get(trial)
            if record is None:
                raise ValueError(f"experiment {self.folder.name} has no trial {trial} that has started")
            last = record.checkpoint[1] if record.checkpoint else 0
            rows = [row for row in self.rows() if row.trial == trial and row.step <= last]
            return reading.facts(), record, rows

    def best_values(self) -> list[tuple[int, int, float]]:
        """Return (trial, step, value) of the best value of each trial, the best first, ties by id."""
        searcher = self._definition.searcher
        sign = 1.0 if searcher.mode == "min" else -1.0
        with closing(Reading(self.folder, searcher.metric)) as reading:
            best = [
                min((sign * value, one.id, step) for step, value in one.values.items() if not math.isnan(value))
                for one in reading.trials.values()
                if any(not math.isnan(value) for value in one.values.values())
            ]
        return [(trial, step, sign * value) for value, trial, step in sorted(best)]

    def best(self) -> Best | None:
        """Return the trial with the best value over all rows, ties by id; None if there is no number."""
        for trial, step, value in self.best_values()[:1]:
            with closing(Reading(self.folder, None)) as reading:
                paths = [path for path, owner, at, _ in reading.checkpoints() if (owner, at) == (trial, step)]
                return Best(trial, value, reading.trials[trial].params, Path(paths[-1]) if paths else None)
        return None


def open(name: Path | str) -> Experiment:
    """Open an experiment by its folder, or by its name in the folder of all experiments.

    Raises:
        FileNotFoundError: there is none.
    """
    for folder in (Path(name), usual_runs() / "experiments" / name):
        with contextlib.suppress(FileNotFoundError):
            return Experiment(folder)
    raise FileNotFoundError(
        f"there is no experiment {str(name)!r}, neither as a folder nor in {usual_runs() / 'experiments'}"
    )


def _state_of(record: TrialRecord, may_go_on: bool, max_steps: int | None, is_live: bool, is_paused: bool) -> str:
    if record.outcome:
        return record.outcome
    if record.slot is not None and is_live:
        return "running"
    if may_go_on:
        return "paused" if is_paused else "waiting"
    return "finished" if record.newest == max_steps else "stopped"


def _check_is_same(folder: Path, definition: _Definition) -> None:
    """Refuse a definition that differs from the one in the folder."""
    try:
        known = _definition_in(folder)
    except FileNotFoundError:
        return
    changed = [name for name, value in vars(definition).items() if vars(known).get(name, value) != value]
    if changed:
        raise LaunchError(
            f"{folder} holds an experiment with another {', '.join(changed)}: give this one another name or folder, or "
            "delete the old one"
        )


def _definition_in(folder: Path) -> _Definition:
    with closing(Reading(folder, None)) as reading:
        definition: _Definition = pickle.loads(reading.facts()["definition"])
    return definition


def _compiled(on_log: Mapping[str, str]) -> list[re.Pattern[str]]:
    """Return the patterns that fail a trial."""
    patterns = []
    for pattern, meaning in on_log.items():
        if meaning != "fail":
            raise ValueError(f"on_log={{{pattern!r}: {meaning!r}}}: the only meaning is 'fail'")
        try:
            patterns.append(re.compile(pattern))
        except re.error as error:
            raise ValueError(f"on_log: {pattern!r} is no regular expression: {error}") from error
    return patterns


def _by_value(recipe: _Recipe) -> bytes:
    """Pickle the recipe; the trial's own module by value, since a later process may not find it by its name."""
    module = sys.modules.get(getattr(recipe.trial, "__module__", "") or "")
    file = getattr(module, "__file__", None)
    known = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    if module is None or file is None or "site-packages" in file or module.__name__ in known:
        return bytes(cloudpickle.dumps(recipe))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(recipe))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _digest(function: Callable[..., Any]) -> str:
    """Return a digest of the function's instructions, which does not change with its place in the file."""
    digest = hashlib.sha256(getattr(function, "__qualname__", type(function).__qualname__).encode())
    code = getattr(function, "__code__", None)
    codes = [code] if isinstance(code, CodeType) else []
    while codes:
        code = codes.pop()
        digest.update(code.co_code)
        digest.update(repr([code.co_names, code.co_varnames, code.co_freevars]).encode())
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                codes.append(constant)
            else:
                digest.update(repr(constant).encode())
    return digest.hexdigest()
