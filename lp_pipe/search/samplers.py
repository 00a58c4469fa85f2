"""Samplers that learn from earlier trials: Optuna's, over a study that is built anew from the committed rows."""

import copy
import hashlib
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lp_pipe.search.searchers import Rows, Searcher
from lp_pipe.search.space import Choice, Dimension, IntegerRange, LogRange, Params, UniformRange, dimensions, nested

_NAMES = ("random", "tpe", "cmaes")


@dataclass(frozen=True)
class Sampled:
    """The draw of a sampler for one trial, and what it keeps with the trial for later ones.

    values: by dotted name; of a choice, the number of the option.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)


def check_sampler(sampler: Any) -> None:
    """Refuse a sampler that cannot be used here, before anything is launched.

    Raises:
        ValueError: it is neither a known name nor an Optuna sampler.
        ModuleNotFoundError: Optuna, or cmaes for "cmaes", is not installed.
    """
    if isinstance(sampler, str) and sampler not in _NAMES:
        raise ValueError(f"sampler={sampler!r} is none of {', '.join(_NAMES)}, and no Optuna sampler")
    if sampler != "random":
        _optuna_sampler(sampler)


def name_of(sampler: Any) -> str:
    """Return what tells one sampler from another when an experiment is launched again."""
    return sampler if isinstance(sampler, str) else type(sampler).__qualname__


def suggest(
    searcher: Searcher, space: Mapping[str, Any], seed: int, trial: int, rows: Rows, sampled: Mapping[int, Sampled]
) -> tuple[Params, Sampled]:
    """Return the parameters of a trial that is about to start. They follow from the arguments alone.

    So a searcher that is killed before it has committed them draws the same ones again.

    sampled: what was drawn for earlier trials.
    """
    import optuna

    ranges = dict(dimensions(space))
    drawn = {name: found for name, one in ranges.items() if (found := _distribution(one)) is not None}
    sampler = _optuna_sampler(searcher.sampler)
    digest = hashlib.sha256(f"lp_pipe search {seed} {trial}".encode()).digest()
    _seed(sampler, int.from_bytes(digest[:4], "little"))
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(sampler=sampler, direction="minimize" if searcher.mode == "min" else "maximize")
        study.add_trials([_as_optuna(searcher, rows, one, known, drawn) for one, known in sorted(sampled.items())])
        asked = study.ask(drawn)
        attributes = dict(study.get_trials(deepcopy=False)[-1].system_attrs)
    finally:
        optuna.logging.set_verbosity(verbosity)
    values = {}
    for name, one in ranges.items():
        if isinstance(one, Choice):
            values[name] = one.options[asked.params[name]]
        elif name in drawn:
            values[name] = asked.params[name]
        else:
            values[name] = one.at(0.0)
    return nested(values), Sampled(dict(asked.params), attributes)


def _distribution(dimension: Dimension) -> Any:
    """Return Optuna's form of what is drawn; None for a constant."""
    from optuna import distributions

    if isinstance(dimension, UniformRange | LogRange):
        return distributions.FloatDistribution(dimension.low, dimension.high, log=isinstance(dimension, LogRange))
    if isinstance(dimension, IntegerRange):
        return distributions.IntDistribution(dimension.low, dimension.high)
    if isinstance(dimension, Choice):
        return distributions.CategoricalDistribution(tuple(range(len(dimension.options))))
    return None


def _as_optuna(searcher: Searcher, rows: Rows, trial: int, known: Sampled, drawn: Mapping[str, Any]) -> Any:
    """Return a trial as Optuna's samplers know it: complete, pruned where the searcher left it, running or failed."""
    from optuna.trial import TrialState, create_trial

    found = rows.of(trial)
    numbers = {step: value for step, value in sorted(found.values.items()) if not math.isnan(value)}
    last = max(found.values, default=0)
    state, value = TrialState.RUNNING, None
    if found.outcome in ("failed", "invalid", "stopped") or (last and last not in numbers):
        state = TrialState.FAIL
    elif found.outcome == "finished" or found.step == searcher.max_steps:
        state, value = (TrialState.COMPLETE, numbers[last]) if numbers else (TrialState.FAIL, None)
    elif numbers and found.step >= (searcher.target(rows, trial) or math.inf):
        state = TrialState.PRUNED  # it waits, or is never promoted
    return create_trial(
        state=state,
        value=value,
        params=dict(known.values),
        distributions=dict(drawn),
        system_attrs=dict(known.attributes),
        intermediate_values=numbers,
    )


def _optuna_sampler(sampler: Any) -> Any:
    """Return a new sampler of this name, or a copy of the given one."""
    try:
        import optuna

        if sampler == "cmaes":
            import cmaes  # noqa: F401  # Optuna imports it later, with another error
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"sampler={sampler!r} needs {error.name}: pip install 'lp_pipe[search]'", name=error.name
        ) from error
    if sampler == "tpe":
        return optuna.samplers.TPESampler()
    if sampler == "cmaes":
        with warnings.catch_warnings():  # without those that were stopped early, it would learn from very few trials
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.CmaEsSampler(consider_pruned_trials=True, warn_independent_sampling=False)
    if not isinstance(sampler, optuna.samplers.BaseSampler):
        raise ValueError(f"sampler={sampler!r} is none of {', '.join(_NAMES)}, and no Optuna sampler")
    return copy.deepcopy(sampler)


def _seed(sampler: Any, seed: int) -> None:
    """Seed every generator of a sampler, and of those inside it: Optuna can only seed a new one."""
    from numpy.random import RandomState
    from optuna.samplers import BaseSampler

    for part in vars(sampler).values():
        if isinstance(generator := getattr(part, "rng", None), RandomState):
            generator.seed(seed)
        elif isinstance(part, BaseSampler):
            _seed(part, seed)
