"""Steps of an asynchronous pipeline, which stays full: the next step begins before this one ends."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from lp_pipe.errors import EndOfData, PipelineError
from lp_pipe.pipeline.conductor.steps import Steps
from lp_pipe.pipeline.conductor.workers import Attempt, Workers, first_cause
from lp_pipe.pipeline.config import PipelineConfig
from lp_pipe.pipeline.protocol import NOTHING_MORE, Report, StepTask, TrainAsync, Wanted
from lp_pipe.pipeline.results import StepResult, StepTrace
from lp_pipe.pipeline.saving.contents import Manifest
from lp_pipe.pipeline.schedule.updates import may_overlap


class _Begun(NamedTuple):
    task: StepTask
    attempt: Attempt[Report]
    began: float


class AsynchronousSteps(Steps):
    """Runs a step ahead of the results, and the forwards of one more, as long as the caller has promised to go on."""

    def __init__(self, config: PipelineConfig, workers: Workers, feeder: Any) -> None:
        super().__init__(config, workers, feeder)
        self._begun: deque[_Begun] = deque()
        self._results: deque[tuple[StepResult, StepTrace]] = deque()  # that the caller will ask for
        self._due: Sequence[StepResult] = ()  # results in the loaded checkpoint, for a loop that goes on from it
        self._promised: StepTask | None = None  # the step after those
        self._ended = 0.0

    def step(
        self, batch: tuple[Any, Any] | None, more: int = 0, wanted: Wanted = NOTHING_MORE
    ) -> tuple[StepResult, StepTrace]:
        """Return the next result; with `more`, the step after it runs on.

        Raises:
            PipelineError: outputs or input gradients are wanted of micro-batches that see different weights.
        """
        if wanted != NOTHING_MORE:
            raise PipelineError(
                "step(outputs=True) and step(input_grad=True) need a synchronous schedule: an asynchronous step's "
                "micro-batches see different weights. Use for example schedule='1f1b'"
            )
        self._due = ()
        if batch is not None:
            self.settle()
            self._results.clear()  # the loop that was to read them was left early
            self._promised = None
            self._begin(self._own_task(batch), ahead=False, from_feeder=False)
            return self._end()
        waiting = len(self._begun) + len(self._results)
        for index in range(waiting, 1 + min(more, 1)):
            try:
                self._begin(self._next_task(), ahead=index < more)
            except EndOfData:
                if not self._begun and not self._results:
                    raise
                break
        return self._results.popleft() if self._results else self._end()

    def go_on(self, count: int, batch: tuple[Any, Any] | None = None) -> list[StepTrace]:
        """Take steps as the base class does; results that the caller may still ask for are kept."""
        kept, self._results = self._results, deque()
        try:
            return super().go_on(count, batch)
        finally:
            self._results = kept

    def settle(self) -> None:
        """Wait for the step ahead, and keep its result."""
        while self._begun:
            self._results.append(self._end())

    @property
    def due(self) -> tuple[StepResult, ...]:
        return (*self._due, *(result for result, _ in self._results))

    def take_due(self) -> int:
        self._results.extend((result, StepTrace(result.step, 0.0, ())) for result in self._due)
        self._due = ()
        return len(self._begun) + len(self._results)

    def go_to(self, found: Manifest) -> None:
        super().go_to(found)
        self._results.clear()
        self._due = found.due
        self._promised = None

    def skip(self, why: str) -> StepResult:
        """Skip a step; as in `step` with a batch, results that the caller has left behind are dropped."""
        self._results.clear()
        self._due = ()
        return super().skip(why)

    def drop_lookahead(self) -> None:
        """Forget the step that was announced to the workers, which will do its first forwards again."""
        self._promised = None

    def _next_task(self) -> StepTask:
        task, self._promised = self._promised, None
        return task if task is not None else self._feeder_task(self.done + len(self._begun))

    def _feeder_task(self, step: int) -> StepTask:
        return self._task_of(self._workers.new_tag(), step, self._batch(step, None), from_feeder=True)

    def _own_task(self, batch: tuple[Any, Any]) -> StepTask:
        return self._task_of(self._workers.new_tag(), self.done, self._batch(self.done, batch), from_feeder=False)

    def _begin(self, task: StepTask, *, ahead: bool, from_feeder: bool = True) -> None:
        if ahead:
            try:
                self._promised = self._feeder_task(task.step + 1)
            except EndOfData:
                self._promised = None
        promised, after = self._promised, self._begun[-1].task.tag if self._begun else 0

        overlaps = promised is not None and may_overlap(
            self._config.timings, self._config.replicas, task.microbatches, promised.microbatches
        )

        def command_for(rank: int) -> TrainAsync:
            following = self._task(rank, promised, from_feeder=True) if promised is not None and overlaps else None
            return TrainAsync(self._task(rank, task, from_feeder=from_feeder), following, after)

        # An abort must also free workers that wait in the first forwards of the step ahead: it may never begin.
        last = promised.tag if promised is not None and overlaps else task.tag
        self._begun.append(_Begun(task, self._workers.begin(last, command_for), time.monotonic()))

    def _end(self) -> tuple[StepResult, StepTrace]:
        task, attempt, began = self._begun.popleft()
        try:
            reports = attempt.replies()
        except BaseException as error:  # layers may end in SystemExit, too
            self._fail(task.step, error)
        began, self._ended = max(began, self._ended), attempt.ended()  # not now: the caller may have been busy
        self.done += 1
        seconds = self._ended - began
        return self._outcome(task, reports, began, seconds, seconds=seconds)

    def _fail(self, step: int, error: BaseException) -> NoReturn:
        """End the step ahead as well: its failure may be what ended this one.

        Raises:
            Exception: the failure that was the cause.
        """
        errors = [error, *(found for begun in self._begun if (found := begun.attempt.failure()) is not None)]
        self._begun.clear()
        self._promised = None
        self._workers.discard()
        cause = first_cause(errors)
        self._mark_failed_update(step, cause)
        raise cause
