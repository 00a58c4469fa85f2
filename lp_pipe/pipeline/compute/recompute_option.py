"""The option `recompute`: which layers of a stage are recomputed together."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.wrapper import unwrapped
from lp_pipe.pipeline.schedule.numbers_given import as_int, is_count


@dataclass(frozen=True)
class FullStages:
    """The option "full" for the stages that begin with these layers; a plan may choose it."""

    first_layers: frozenset[int]


Recompute = str | tuple[str, int] | Callable[[int, Any], bool] | FullStages


class LayerRun(NamedTuple):
    """The layers `first` to `end` (not included) of the model."""

    first: int
    end: int
    is_recomputed: bool


def check_recompute(option: Any) -> None:
    """Refuse a value that is no `Recompute`.

    Raises:
        PipelineError: the error lists the values.
    """
    if callable(option) or isinstance(option, FullStages) or option in ("none", "full") or _every(option) is not None:
        return
    raise PipelineError(
        f'recompute={option!r}: give "none", "full", ("every", k) with k of at least 1, or a function of '
        "(layer_index, layer) that returns whether to recompute the layer"
    )


def runs_of(
    option: Recompute, first_layer: int, layers: Sequence[Any], never: Collection[int] = frozenset()
) -> list[LayerRun]:
    """Return a stage's layers in consecutive runs.

    "none" and "full": one run. ("every", k): runs of k layers, counted from the stage's first one; the last may be
    shorter. FullStages: one run. A function: each layer that it chooses is a run of its own.

    never: indices of layers that are never recomputed; they divide a run.
    """
    return [piece for run in _chosen(option, first_layer, layers) for piece in _without(run, never)]


def _without(run: LayerRun, never: Collection[int]) -> Iterator[LayerRun]:
    first = run.first
    for index in range(run.first, run.end) if run.is_recomputed else ():
        if index in never:
            if first < index:
                yield LayerRun(first, index, True)
            yield LayerRun(index, index + 1, False)
            first = index + 1
    if first < run.end:
        yield run._replace(first=first)


def _chosen(option: Recompute, first_layer: int, layers: Sequence[Any]) -> list[LayerRun]:
    end = first_layer + len(layers)
    every = _every(option)
    if every is not None:
        return [LayerRun(first, min(first + every, end), True) for first in range(first_layer, end, every)]
    if isinstance(option, FullStages):
        return [LayerRun(first_layer, end, first_layer in option.first_layers)]
    if not callable(option):
        return [LayerRun(first_layer, end, option == "full")]
    runs: list[LayerRun] = []
    for index, layer in enumerate(layers, start=first_layer):
        chosen = bool(option(index, unwrapped(layer)))
        if runs and not chosen and not runs[-1].is_recomputed:
            runs[-1] = runs[-1]._replace(end=index + 1)
        else:
            runs.append(LayerRun(index, index + 1, chosen))
    return runs


def _every(option: Any) -> int | None:
    if not isinstance(option, (tuple, list)) or len(option) != 2 or option[0] != "every":
        return None
    k = as_int(option[1])
    return k if is_count(k) else None
