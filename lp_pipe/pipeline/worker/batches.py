"""Batches from the feeder, asked for one step ahead."""

from concurrent.futures import Future
from typing import Any

from lp_pipe.errors import PipelineError, noting
from lp_pipe.pipeline.layers.microbatches import check_pair
from lp_pipe.rpc.futures import read_by


class BatchSource:
    """Asks a feeder's `batch(step)`; the next step's batch travels while this step computes."""

    def __init__(self, feeder: Any) -> None:
        self._feeder = feeder
        self._ahead: tuple[int, Future[Any]] | None = None

    def get(self, step: int) -> tuple[Any, Any] | None:
        """The batch of a step, or None at the end of the data.

        Raises:
            PipelineError: the pipeline has no feeder, or the feeder returned something else than a pair.
        """
        if self._feeder is None:
            raise PipelineError("step() without a batch needs a feeder: add_pipeline(..., inputs=feeder_handle)")
        if self._ahead and self._ahead[0] == step:
            (_, future), self._ahead = self._ahead, None
        else:
            self.forget_ahead()
            future = self._feeder.futures.batch(step)
        with noting(f"in the feeder's batch({step})"):
            batch = future.result()
        if batch is None:
            return None
        pair = check_pair(batch, f"the pipeline, from the feeder's batch({step}),")
        self._ahead = (step + 1, read_by("thread", self._feeder).batch(step + 1))
        return pair

    def confirm_end(self, step: int) -> None:
        """Somebody else was told that the data ends before this step; what this worker was told, if it has asked.

        Raises:
            PipelineError: it was a batch. Or whatever the feeder has raised.
        """
        if self._ahead is None or self._ahead[0] != step:
            return
        (_, future), self._ahead = self._ahead, None
        with noting(f"in the feeder's batch({step}), which has said None to the first stage"):
            batch = future.result()
        if batch is not None:
            raise PipelineError(
                f"the feeder gave the first stage None for step {step}, and another one a batch: batch(step) must be a "
                "pure function of the step"
            )

    def forget_ahead(self) -> None:
        """Forget the next batch: the pipeline goes on from somewhere else, perhaps because the feeder has died.

        A call that still waits for the feeder to be up is never sent. A feeder with a state has gone back by then, and
        would draw a batch that nothing uses.
        """
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None
