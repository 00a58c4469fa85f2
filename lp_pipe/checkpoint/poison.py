"""Detect steps that always fail: a batch that kills a stage will do so again after every restart."""

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

from lp_pipe.checkpoint.parts import Trainable
from lp_pipe.context import stop_event
from lp_pipe.errors import CheckpointError, EndOfData, NonFiniteError, PoisonBatchError, Unavailable

_log = logging.getLogger(__name__)
_NODE = re.compile(r"([^\s'\"]+/\d+)(?=[.:\s])")


class TryAgain(Exception):
    """A step has raised, and will be tried again from a checkpoint."""


class PoisonSteps:
    """A counter of how often in a row each step has failed, which decides when its batch is poison.

    tries: the number of failures that make a batch poison. on_poison: "stop" or "skip" the step then.
    ahead: how many later steps may run while the result of a step is awaited; each of them may be the one that failed.
    """

    def __init__(self, tries: int, on_poison: str, ahead: int) -> None:
        """Raises:
        ValueError: an argument is invalid.
        """
        if tries < 1:
            raise ValueError(f"tries must be at least 1, got tries={tries}")
        if on_poison not in ("stop", "skip"):
            raise ValueError(f"on_poison must be 'stop' or 'skip', got on_poison={on_poison!r}")
        self._tries = tries
        self._skips = on_poison == "skip"
        self._ahead = ahead
        self._failures = 0  # in a row, of step `_suspect` or one of the `_others` steps after it
        self._suspect = self._others = -1
        self._why: dict[int, str] = {}  # by skipped step: the reason

    @property
    def _runs_alone(self) -> bool:
        """Whether steps run one at a time: the next failure may be the last try, and must identify its step.

        Not before that: work between two steps (an evaluation, `scheduler_step`) happens at another point when steps
        overlap, and most failures are not caused by a batch, so the results must be the same as without the failure.
        """
        return self._failures > 0 and self._failures >= self._tries - 1

    def __contains__(self, step: int) -> bool:
        """Return whether a step is skipped."""
        return step in self._why

    def results(self, pipeline: Trainable, step: int, total: int) -> Iterator[Any]:
        """Yield the results of the steps from `step` to `total`; fewer if the data ends.

        Steps run one at a time once one of them may be poison.

        Raises:
            PoisonBatchError: a step has failed `tries` times.
            TryAgain: a step has raised, but not that often.
            Exception: as the pipeline's steps.
        """
        while step < total:
            if step in self._why:
                yield from self._awaited(pipeline, step, 0)  # results that the checkpoint contains
                yield pipeline.skip_step(self._why[step])
                step += 1
                continue
            count = 1 if self._runs_alone else min((s for s in self._why if s > step), default=total) - step
            before = step
            for result in self._awaited(pipeline, step, count):
                yield result
                step = result.step + 1
            if step < before + count:
                return
        yield from self._awaited(pipeline, step, 0)  # all steps are done: only results that the checkpoint contains

    @contextlib.contextmanager
    def ahead_of(self, step: int) -> Iterator[None]:
        """Count an error of the body, which waits for steps that run ahead of `step`, as a failure of the next step."""
        try:
            yield
        except Exception as error:
            if self._ahead and not self._runs_alone:
                self._failed(step + 1, error)
            raise

    def check(self, step: int, loss: Unavailable | None) -> None:
        """Raise `loss`, the death of a part, as a failure of the next step: it may have asked the part for a batch."""
        if loss is not None:
            self._failed(step, loss)
            raise loss

    def _awaited(self, pipeline: Trainable, step: int, count: int) -> Iterator[Any]:
        results = pipeline.steps(count)
        while True:
            try:
                result = next(results, None)
            except Exception as error:
                self._failed(step, error)
                raise
            if result is None:
                return
            step = result.step
            self._succeeded(step)
            yield result
            step += 1

    def _succeeded(self, step: int) -> None:
        if self._failures and step == self._suspect:
            # The failed step may have been one of those that ran ahead of it.
            self._suspect, self._others = step + 1, self._others - 1
            self._failures = self._failures if self._others >= 0 else 0

    def _failed(self, step: int, error: Exception) -> None:
        if not self._may_be_poison(error) or stop_event().is_set():
            return
        is_certain = self._runs_alone or not self._ahead
        if not self._failures or not self._suspect <= step <= self._suspect + self._others:
            self._failures, self._suspect, self._others = 0, step, self._ahead
        elif self._runs_alone:
            self._others = 0
        self._failures += 1
        first_line = str(error).partition("\n")[0]
        if self._failures < self._tries or not is_certain:
            if not isinstance(error, Unavailable):
                _log.warning("step %d failed (try %d of %d): %s", step, self._failures, self._tries, first_line)
                raise TryAgain from error
            return
        times = f"{self._failures} times in a row" if self._failures > 1 else "once"
        why = f"step {step} has failed {times}, the last time{_where(first_line)}: {first_line}"
        if not self._skips:
            raise PoisonBatchError.at(
                step,
                f"{why}. Its batch is the likely cause: correct it (feeder.batch({step})), or skip it with "
                "Checkpoints.steps(..., on_poison='skip')",
            ) from error
        self._why[step], self._failures = why, 0
        _log.warning("%s; its batch is skipped", why)
        if not isinstance(error, Unavailable):
            raise TryAgain from error

    def _may_be_poison(self, error: Exception) -> bool:
        """Return whether an error counts. A stage's exception, which nearly always repeats, counts only with "skip"."""
        if isinstance(error, Unavailable):
            return True
        return self._skips and not isinstance(error, (CheckpointError, EndOfData, NonFiniteError))


def _where(first_line: str) -> str:
    """Return " in NODE" for the node that an error's text names last: the one where it started."""
    nodes = _NODE.findall(first_line)
    return f" in {nodes[-1]}" if nodes else ""
