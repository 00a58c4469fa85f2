"""What a user's training task gives, checked where it is given: a server would wait for ever for what fits."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class TrainingTask(Protocol):
    """What is trained; goes to all nodes, and must pickle (or be a Deferred)."""

    def initial_parameters(self) -> Vector:
        """All of them as one vector; the same at every call."""

    def gradient(self, parameters: Vector, step: int, rank: int) -> Vector:
        """Of the batch that `step` and `rank` decide: a function of its arguments, so that it can be computed again."""

    def evaluate(self, parameters: Vector) -> dict[str, float]:
        """Numbers for the display and the result, such as the test accuracy."""


class CheckedTask:
    """A task, as itself, whose answers have the right shape.

    Raises (all methods): TypeError, which says what the task gave.
    """

    def __init__(self, task: TrainingTask) -> None:
        self._task = task

    def initial_parameters(self) -> Vector:
        given = self._task.initial_parameters()
        found = _as_array(given)
        if found is None or found.ndim == 0:
            raise TypeError(f"parameter_server: initial_parameters() gave {_kind(given)}; one vector is needed")
        return found

    def gradient(self, parameters: Vector, step: int, rank: int) -> Vector:
        given = self._task.gradient(parameters, step, rank)
        found = _as_array(given)
        if found is None or found.shape != parameters.shape:
            raise TypeError(
                f"parameter_server: gradient() of step {step}, rank {rank}, gave {_kind(given)}; the parameters are "
                f"of shape {parameters.shape}"
            )
        return found

    def evaluate(self, parameters: Vector) -> dict[str, float]:
        given = self._task.evaluate(parameters)
        if not isinstance(given, Mapping):
            raise TypeError(f"parameter_server: evaluate() gave {_kind(given)}; a dict of numbers is needed")
        return dict(given)


def _as_array(given: Any) -> Vector | None:
    """None for what holds no numbers."""
    found = np.asarray(given)
    return found if found.dtype.kind in "fiub" else None


def _kind(given: Any) -> str:
    shape = getattr(given, "shape", None)
    return type(given).__name__ if shape is None else f"{type(given).__name__} of shape {tuple(shape)}"
