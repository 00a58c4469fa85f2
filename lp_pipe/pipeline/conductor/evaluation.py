"""An evaluation that gets its batches in windows, so that its memory does not depend on the size of the data set."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.microbatches import check_pair
from lp_pipe.pipeline.loss_metrics import Totals, merged, results, scaled
from lp_pipe.pipeline.results import EvalResult

Batch = tuple[Any, Any]


class WindowMeans(NamedTuple):
    """The mean loss and the metrics of some batches. weight: what `Model.loss_weight` gives all their targets."""

    loss: float
    metrics: Totals
    weight: float


def result_of(windows: Sequence[WindowMeans]) -> EvalResult:
    """Return the means over all windows."""
    if len(windows) == 1:
        return EvalResult(windows[0].loss, results(windows[0].metrics))
    whole = sum(window.weight for window in windows)
    shares = [window.weight / whole for window in windows]
    loss = sum(window.loss * share for window, share in zip(windows, shares, strict=True))
    parts = [scaled(window.metrics, share) for window, share in zip(windows, shares, strict=True)]
    return EvalResult(loss, results(merged(parts)))


Infer = Callable[[Sequence[Batch]], WindowMeans]


class RunningEvaluation:
    """An operation of the conductor that evaluates window after window until `end`.

    No other operation runs in between, so that all windows see the same weights.
    """

    def __init__(self) -> None:
        self._inbox: SimpleQueue[tuple[Sequence[Batch], Future[None]] | None] = SimpleQueue()
        self._windows: list[WindowMeans] = []

    def run(self, infer: Infer) -> EvalResult:
        """Evaluate the windows that `add` brings, until `end`. Runs in the thread of the conductor's operations."""
        while (item := self._inbox.get()) is not None:
            window, done = item
            try:
                self._windows.append(infer(window))
            except BaseException as error:  # layers may end in SystemExit, too
                done.set_exception(error)
            else:
                done.set_result(None)
        return result_of(self._windows)

    def add(self, window: Sequence[Batch]) -> "Future[None]":
        """Queue a window; the future is done when the window is evaluated, or has failed."""
        done: Future[None] = Future()
        self._inbox.put((window, done))
        return done

    def end(self) -> None:
        """Let `run` return once it has evaluated what was added before. May be called again."""
        self._inbox.put(None)


def checked_window(batches: Sequence[Any]) -> list[Batch]:
    """Return the batches as (input, target) pairs.

    Raises:
        PipelineError: a batch is something else, or there is no batch.
    """
    if not batches:
        raise PipelineError("evaluate() needs at least one (input, target) pair")
    return [check_pair(batch, "each batch given to evaluate()") for batch in batches]
