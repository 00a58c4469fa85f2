"""A rule that ends a training that no longer improves."""

import math
from typing import Any


class EarlyStopping:
    """A rule that ends a training when a value has not improved for `patience` calls in a row.

        stop = pp.EarlyStopping(patience=3)
        for result in pipeline.steps():
            if result.step % 100 == 99 and stop(pipeline.evaluate(validation).loss):
                break

    Make it a part of `Checkpoints`, so that a training that goes back or is resumed counts as one that never ended.

    mode: "min" or "max": which value is the best. min_delta: by how much at least a value must be better than the best
        one to count as an improvement. A value that is NaN never does.
    best: the best value until now; None before the first.

    Raises:
        ValueError: an argument makes no sense.
    """

    def __init__(self, patience: int, *, mode: str = "min", min_delta: float = 0.0) -> None:
        if patience < 1:
            raise ValueError(f"patience={patience}: give a number of calls, at least 1")
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r} must be 'min' or 'max'")
        if not min_delta >= 0:
            raise ValueError(f"min_delta={min_delta}: give a number of at least 0")
        self._patience = patience
        self._sign = 1 if mode == "min" else -1
        self._min_delta = min_delta
        self._failures = 0  # calls since the best value
        self.best: float | None = None

    @property
    def has_stopped(self) -> bool:
        """Whether the last call returned True, even if that was before a resume."""
        return self._failures >= self._patience

    def __call__(self, value: Any) -> bool:
        """Take the next value; return whether to stop."""
        value = float(value)
        if self._is_better(value):
            self.best, self._failures = value, 0
        else:
            self._failures += 1
        return self.has_stopped

    def _is_better(self, value: float) -> bool:
        if math.isnan(value) or self.best is None:
            return not math.isnan(value)
        return self._sign * (self.best - value) > self._min_delta

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and how many calls ago it was."""
        return {"best": self.best, "failures": self._failures}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self.best, self._failures = state["best"], state["failures"]
