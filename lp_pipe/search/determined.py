"""Read the searcher and the hyperparameters of a Determined AI experiment file."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lp_pipe.search.searchers import Brackets, Grid, Halving, Random, Searcher, Single
from lp_pipe.search.space import choice, integer, log, uniform

_MOST_RUNGS = 5
_BRACKETS: dict[str, Brackets] = {
    "aggressive": "aggressive",
    "standard": "standard",
    "conservative": "conservative",
}


def from_yaml(path: Path | str) -> dict[str, Any]:
    """Return the `space`, `searcher` and `max_restarts` of an experiment file, as arguments of `ls.experiment`.

        ls.experiment("mnist", trial, **ls.from_yaml("adaptive.yaml"), slots=4)

    A step is the unit of the file's `max_length` (or `max_time`): batches, records or epochs.

    Raises:
        ValueError: the file has a searcher or a type of hyperparameter that is not known; it is named.
        ModuleNotFoundError: PyYAML is not installed.
    """
    import yaml  # only needed for such a file

    config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    space = {name: _dimension(name, value) for name, value in (config.get("hyperparameters") or {}).items()}
    searcher = _searcher(config.get("searcher") or {})
    if isinstance(searcher, Grid):
        space = _with_points(space, config["hyperparameters"])
    return {"space": space, "searcher": searcher, "max_restarts": int(config.get("max_restarts", 5))}


def _dimension(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "type" not in value:
        return {inner: _dimension(f"{name}.{inner}", part) for inner, part in value.items()}
    kind = value["type"]
    if kind == "const":
        return value["val"]
    if kind == "categorical":
        return choice(*value["vals"])
    if kind == "int":
        return integer(value["minval"], value["maxval"])
    if kind == "double":
        return uniform(value["minval"], value["maxval"])
    if kind == "log":
        base = float(value.get("base", 10))
        return log(base ** value["minval"], base ** value["maxval"])
    raise ValueError(f"hyperparameter {name}: type {kind!r} is none of const, categorical, int, double, log")


def _with_points(space: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the space of a grid: ranges with a `count` become that many points at equal distances."""
    points: dict[str, Any] = {}
    for name, value in space.items():
        given = config[name]
        if isinstance(value, dict):
            points[name] = _with_points(value, given)
        elif isinstance(given, Mapping) and given.get("count") and hasattr(value, "at"):
            count = int(given["count"])
            points[name] = choice(*dict.fromkeys(_point(value, i, count) for i in range(count)))
        else:
            points[name] = value
    return points


def _point(dimension: Any, index: int, count: int) -> Any:
    share = index / (count - 1) if count > 1 else 0.0
    low, high = getattr(dimension, "low", None), getattr(dimension, "high", None)
    if isinstance(low, int) and isinstance(high, int):
        return round(low + share * (high - low))
    return dimension.at(share)


def _searcher(config: Mapping[str, Any]) -> Searcher:
    name = config.get("name", "single")
    metric = config.get("metric", "")
    mode = "min" if config.get("smaller_is_better", True) else "max"
    steps = _length(config.get("max_time", config.get("max_length")))
    if name == "single":
        return Single(steps, metric or None, mode)
    if steps is None:
        raise ValueError(f"searcher {name!r} needs max_length, or max_time")
    if name == "grid":
        return Grid(metric, steps, mode)
    trials = int(config["max_trials"])
    if name == "random":
        return Random(metric, trials, steps, mode)
    if name not in ("adaptive_asha", "asha", "async_halving"):
        raise ValueError(f"searcher {name!r} is none of single, grid, random, asha, adaptive_asha")
    divisor = round(float(config.get("divisor", 4)))
    most = int(config.get("max_rungs", config.get("num_rungs", _MOST_RUNGS)))
    possible = 1 + min(math.floor(math.log(max(steps, 1), divisor) + 1e-9), most - 1)
    first = max(1, steps // divisor ** (possible - 1)) if most < _MOST_RUNGS else None
    brackets = _BRACKETS[str(config.get("mode", "standard"))] if name == "adaptive_asha" else "aggressive"
    return Halving(metric, trials, steps, divisor, first, mode, brackets)


def _length(value: Any) -> int | None:
    """Return the number of a length, which is a number or such as {"batches": 1000}."""
    if isinstance(value, Mapping):
        (value,) = value.values()
    return None if value is None else int(value)
