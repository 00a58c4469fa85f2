"""Metrics that a loss function returns, and how those of micro-batches become one value of a step or an evaluation."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lp_pipe.errors import PipelineError

# Weights that are shares of a whole add up to 1 but for rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Sum:
    """A metric that adds up over micro-batches and batches: a count, a confusion matrix (a number or a tensor)."""

    value: Any


@dataclass(frozen=True)
class Max:
    """A metric that keeps its largest value (a number, or a tensor, element by element)."""

    value: Any


@dataclass(frozen=True)
class Mean:
    """A metric that is a mean over `weight` things (positives, tokens); micro-batches count by this weight.

    A plain number or tensor is a mean too, weighted as the micro-batch's loss (`Model.loss_weight`).
    """

    value: Any
    weight: float


class _LossMean(Mean):
    """A mean that is weighted as the loss is: a plain number or tensor."""


@dataclass
class Total:
    """A metric over some micro-batches. kind: the class that the loss function returned it in."""

    kind: type
    value: Any
    weight: float = 0.0

    @property
    def is_mean(self) -> bool:
        return issubclass(self.kind, Mean)

    def add(self, other: "Total", name: str) -> None:
        """Add the same metric of further micro-batches.

        Raises:
            PipelineError: it is of another kind or shape there.
        """
        if other.kind is not self.kind:
            kinds = " and ".join(_NAMES[kind] for kind in (self.kind, other.kind))
            raise PipelineError(f"the loss function's metric {name!r} must be of one kind, got {kinds}")
        self.weight += other.weight
        try:
            self.value = _larger(self.value, other.value) if self.kind is Max else self.value + other.value
        except RuntimeError as error:
            raise PipelineError(f"the loss function's metric {name!r} has another shape: {error}") from error

    def result(self) -> Any:
        """Return the metric's value: a float, or a tensor."""
        if not self.is_mean or abs(self.weight - 1.0) < _ROUNDING:
            return self.value
        return self.value / self.weight


_NAMES = {Sum: "pp.Sum", Max: "pp.Max", Mean: "pp.Mean", _LossMean: "a plain value"}
Totals = dict[str, Total]


def add_metrics(totals: Totals, metrics: Mapping[str, Any], weight: float) -> None:
    """Add what the loss function returned for one micro-batch, whose loss has this weight.

    Raises:
        PipelineError: a metric is no number and no tensor, or differs in kind or shape from the other micro-batches'.
    """
    for name, metric in metrics.items():
        total = _total_of(name, metric, weight)
        if total.is_mean and total.weight == 0.0:
            continue  # a mean over nothing
        if name in totals:
            totals[name].add(total, name)
        else:
            totals[name] = total


def merged(parts: Iterable[Totals]) -> Totals:
    """Return the totals of several workers or windows together, added up in this order."""
    whole: Totals = {}
    for part in parts:
        for name, total in part.items():
            if name in whole:
                whole[name].add(total, name)
            else:
                whole[name] = Total(total.kind, total.value, total.weight)
    return whole


def scaled(totals: Totals, factor: float) -> Totals:
    """Return the totals with the loss's weights multiplied by a factor, as shares of a larger whole."""
    return {
        name: Total(one.kind, one.value * factor, one.weight * factor) if one.kind is _LossMean else one
        for name, one in totals.items()
    }


def results(totals: Totals) -> dict[str, Any]:
    """Return each metric's value."""
    return {name: total.result() for name, total in totals.items()}


def _total_of(name: str, metric: Any, weight: float) -> Total:
    if isinstance(metric, Sum | Max):
        return Total(type(metric), _value(name, metric.value))
    if isinstance(metric, Mean):
        own_weight = _number(name, metric.weight)
        return Total(Mean, _value(name, metric.value) * own_weight, own_weight)
    return Total(_LossMean, _value(name, metric) * weight, weight)


def _value(name: str, value: Any) -> Any:
    """Return a float, or a tensor on the CPU that shares no memory with the loss function's."""
    if getattr(value, "ndim", 0) and hasattr(value, "detach"):
        return value.detach().cpu().clone()
    return _number(name, value)


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PipelineError(
            f"the loss function's metric {name!r} must be a number or a tensor, got {value!r} of type "
            f"{type(value).__name__}"
        ) from error


def _larger(one: Any, other: Any) -> Any:
    """Return the larger one, element by element; NaN if either is."""
    if hasattr(one, "maximum"):
        return one.maximum(other)
    return one if one >= other or one != one else other
