"""Check the values that a user's training task returns: a server would wait forever for a gradient that fits."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class TrainingTask(Protocol):
    """A model and its data. It is sent to all nodes, so it must be picklable (or a Deferred)."""

    def initial_parameters(self) -> Vector:
        """Return all parameters as one vector; the same at every call."""

    def gradient(self, parameters: Vector, step: int, rank: int) -> Vector:
        """Return the gradient for a batch that `step` and `rank` select.

        A function of its arguments only, so that it can be computed again.
        """

    def evaluate(self, parameters: Vector) -> dict[str, float]:
        """Return numbers for the display and the result, such as the test accuracy."""


class CheckedTask:
    """A wrapper of a task that checks the shapes of its results.

    Raises (all methods): TypeError: the result has the wrong type or shape.
    """

    def __init__(self, task: TrainingTask) -> None:
        self._task = task

    def initial_parameters(self) -> Vector:
        given = self._task.initial_parameters()
        found = _as_array(given)
        if found is None or found.ndim == 0:
            raise TypeError(f"parameter_server: initial_parameters() gave {_kind(given)}, but must return one vector")
        return found

    def gradient(self, parameters: Vector, step: int, rank: int) -> Vector:
        given = self._task.gradient(parameters, step, rank)
        found = _as_array(given)
        if found is None or found.shape != parameters.shape:
            raise TypeError(
                f"parameter_server: gradient() of step {step}, rank {rank}, gave {_kind(given)}, but must return an "
                f"array of the parameters' shape {parameters.shape}"
            )
        return found

    def evaluate(self, parameters: Vector) -> dict[str, float]:
        given = self._task.evaluate(parameters)
        if not isinstance(given, Mapping):
            raise TypeError(f"parameter_server: evaluate() gave {_kind(given)}, but must return a dict of numbers")
        return dict(given)


def _as_array(given: Any) -> Vector | None:
    """Return the value as an array; None if it holds no numbers."""
    found = np.asarray(given)
    return found if found.dtype.kind in "fiub" else None


def _kind(given: Any) -> str:
    shape = getattr(given, "shape", None)
    return type(given).__name__ if shape is None else f"{type(given).__name__} of shape {tuple(shape)}"
