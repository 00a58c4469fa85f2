"""Steps with a loss or gradient that is not finite: `add_pipeline(on_nan=...)` says what becomes of them."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from lp_pipe.context import log_metrics
from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.conductor.workers import Workers
from lp_pipe.pipeline.protocol import Report
from lp_pipe.pipeline.worker.nonfinite import described, error_of, first

CHOICES = ("ignore", "stop", "skip")
_log = logging.getLogger(__name__)


def check_on_nan(choice: Any, *, is_asynchronous: bool) -> None:
    """Check the argument `on_nan`.

    Raises:
        PipelineError: there is no such choice, or not with this kind of schedule.
    """
    if choice not in CHOICES:
        raise PipelineError(f"on_nan={choice!r}: must be 'ignore', 'stop' or 'skip'")
    if choice == "skip" and is_asynchronous:
        raise PipelineError(
            "on_nan='skip' does not work with an asynchronous schedule: its stages update before the step's loss is "
            "known. Use 'stop', or a synchronous schedule such as '1f1b'"
        )


class OnNan:
    """Decides whether a step of a synchronous schedule is left out."""

    def __init__(self, choice: str, workers: Workers) -> None:
        self._choice = choice
        self._workers = workers

    def why_skipped(
        self,
        step: int,
        reports: Sequence[Report],
        loss: float,
        search: Callable[[], Sequence[Report]],
        *,
        is_scaled: bool,
    ) -> str:
        """Return why the step is to be left out; "" when all is finite, or is not to be checked.

        search: runs the step again and looks at every layer. Before and after it the workers forget what the step has
        changed, so that afterwards they are as before the step.

        Raises:
            NonFiniteError: with on_nan="stop"; names the layer.
        """
        # With a loss scale, gradients that are not finite are that scale's business.
        has_bad_gradients = not is_scaled and any(report.overflowed for report in reports)
        if self._choice == "ignore" or (math.isfinite(loss) and not has_bad_gradients):
            return ""
        self._workers.discard()
        found = first(place for report in search() for place in report.nonfinite)
        self._workers.discard()
        what = f"step {step}: " + (f"the loss is {loss}" if not math.isfinite(loss) else "the gradients are not finite")
        if self._choice == "stop":
            raise error_of(step, what, found, "parameters, buffers and optimizer are as before the step")
        why = described(what, found)
        _log.warning("%s; the update is left out on all stages", why)
        log_metrics({"skipped": 1.0}, step)
        return why
