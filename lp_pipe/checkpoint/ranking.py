"""The order of checkpoints by a metric that was saved with each."""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path

from lp_pipe.checkpoint.folder import Checkpoint, checkpoints_in, open_checkpoint
from lp_pipe.errors import CheckpointError


class Ranking:
    """The order of checkpoints by their metric `monitor`; `Checkpoints` explains the arguments."""

    def __init__(self, keep_best: int, monitor: str | None, mode: str) -> None:
        """
        Raises:
            ValueError: says which argument is wrong.
        """
        if keep_best < 0:
            raise ValueError(f"keep_best={keep_best}: give a number of checkpoints, at least 0")
        if keep_best and monitor is None:
            raise ValueError(f"keep_best={keep_best} needs monitor=…, the name of the metric that decides")
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r} must be 'min' or 'max'")
        self._keep_best = keep_best
        self._monitor = monitor
        self._sign = 1 if mode == "min" else -1

    def check(self, metrics: Mapping[str, float]) -> None:
        """Refuse a checkpoint's metrics that lack the monitored one, which may be misspelt.

        Raises:
            ValueError: says which there are.
        """
        if metrics and self._monitor is not None and self._monitor not in metrics:
            raise ValueError(f"monitor={self._monitor!r} is not among the metrics {', '.join(metrics)}")

    def best_first(self, folder: Path) -> list[Checkpoint]:
        """Return the checkpoints that have the metric, the best first; of equal ones the oldest.

        Raises:
            ValueError: there is no metric to look at.
        """
        if self._monitor is None:
            raise ValueError("best() needs Checkpoints(..., monitor=…), the name of the metric that decides")
        name, found = self._monitor, []
        for path in checkpoints_in(folder):
            with contextlib.suppress(CheckpointError):
                checkpoint = open_checkpoint(path)
                if not math.isnan(checkpoint.metrics.get(name, math.nan)):
                    found.append(checkpoint)
        return sorted(found, key=lambda one: (self._sign * one.metrics[name], one.step))

    def kept(self, folder: Path) -> set[Path]:
        """Return the folders of those that are kept for being the best."""
        if not self._keep_best:
            return set()
        return {checkpoint.path for checkpoint in self.best_first(folder)[: self._keep_best]}
