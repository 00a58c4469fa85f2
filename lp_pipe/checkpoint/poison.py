"""Steps that always fail: a batch that kills a stage will do so again after every restart."""

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
    """A step has raised, and may be tried again from a checkpoint."""


class PoisonSteps:
    """Counts how often in a row a step has failed.

    tries: that many times make its batch poison. on_poison: what becomes of it then, "stop" or "skip".
    ahead: how many steps beside the awaited one may be under way, so that one of them may be what has failed.
    """

    def __init__(self, tries: int, on_poison: str, ahead: int) -> None:
        """Raises:
        ValueError: one of them makes no sense.
        """
        if tries < 1:
            raise ValueError(f"tries={tries}: a step must be tried at least once")
        if on_poison not in ("stop", "skip"):
            raise ValueError(f"on_poison={on_poison!r}: known are 'stop' and 'skip'")
        self._tries = tries
        self._skips = on_poison == "skip"
        self._ahead = ahead
        self._failures = 0  # in a row, of step `_suspect` or one of the `_others` behind it
        self._suspect = self._others = -1
        self._why: dict[int, str] = {}  # why a step is left out

    @property
    def _runs_alone(self) -> bool:
        """Whether the next failure may be the last, and has to say which step it is.

        Not before: what is done between two steps that overlap comes later than between two that do not (an
        evaluation, `scheduler_step`), and most failures are no batch's, so that the results must be as without them.
        """
        return self._failures > 0 and self._failures >= self._tries - 1

    def __contains__(self, step: int) -> bool:
        """Whether a step is left out."""
        return step in self._why

    def results(self, pipeline: Trainable, step: int, total: int) -> Iterator[Any]:
        """Those of the steps from `step` on, one at a time where one of them is suspect; fewer at the end of the data.

        Raises:
            PoisonBatchError: a step has failed too often.
            TryAgain: it has raised, but not too often.
            Exception: as the pipeline's steps.
        """
        while step < total:
            if step in self._why:
                yield from self._awaited(pipeline, step, 0)  # results that the checkpoint came with
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
        yield from self._awaited(pipeline, step, 0)  # where nothing is left to do but to have them

    @contextlib.contextmanager
    def ahead_of(self, step: int) -> Iterator[None]:
        """The body waits for what runs ahead of this step, whose result has come."""
        try:
            yield
        except Exception as error:
            if self._ahead and not self._runs_alone:
                self._failed(step + 1, error)
            raise

    def check(self, step: int, loss: Unavailable | None) -> None:
        """Raise the death of a part, if any, as a failure of `step`, the next one: it may have asked for its batch."""
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
            # What had failed may have been one of those that ran ahead of it.
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
                _log.warning("step %d has failed (try %d of %d): %s", step, self._failures, self._tries, first_line)
                raise TryAgain from error
            return
        times = f"{self._failures} times in a row" if self._failures > 1 else "once"
        why = f"step {step} has failed {times}, the last time{_where(first_line)}: {first_line}"
        if not self._skips:
            raise PoisonBatchError.at(
                step,
                f"{why}. Its batch seems to be what does it: mend it (feeder.batch({step})), or leave it out with "
                "Checkpoints.steps(..., on_poison='skip')",
            ) from error
        self._why[step], self._failures = why, 0
        _log.warning("%s; its batch is left out", why)
        if not isinstance(error, Unavailable):
            raise TryAgain from error

    def _may_be_poison(self, error: Exception) -> bool:
        """What a stage raises is tried again only where it may be left out in the end: nearly always it comes again."""
        if isinstance(error, Unavailable):
            return True
        return self._skips and not isinstance(error, (CheckpointError, EndOfData, NonFiniteError))


def _where(first_line: str) -> str:
    """The node that an error's text names last, which is the one that began it."""
    nodes = _NODE.findall(first_line)
    return f" in {nodes[-1]}" if nodes else ""
