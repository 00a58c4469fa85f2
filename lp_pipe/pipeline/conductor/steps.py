"""Steps of training on all workers: each step happens on all of them, or on none."""

import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from torch import Tensor

from lp_pipe.context import context, log_metrics
from lp_pipe.errors import EndOfData, PipelineError, ScheduleError, Unavailable, add_note, noting
from lp_pipe.pipeline.conductor.on_nan import OnNan
from lp_pipe.pipeline.conductor.stragglers import Stragglers
from lp_pipe.pipeline.conductor.utilization import UtilizationLog
from lp_pipe.pipeline.conductor.workers import Workers
from lp_pipe.pipeline.config import PipelineConfig
from lp_pipe.pipeline.layers.batch_dims import marked
from lp_pipe.pipeline.layers.batch_gradients import joined_gradients, joined_outputs, without_graph
from lp_pipe.pipeline.layers.microbatches import aligned, apart, check_pair, count
from lp_pipe.pipeline.loss_metrics import Totals, merged, results
from lp_pipe.pipeline.protocol import (
    NOTHING_MORE,
    Apply,
    Command,
    ConfirmEnd,
    GetUpdateProgress,
    Report,
    SearchNonFinite,
    ShareTiedWeights,
    StepTask,
    Train,
    UpdateProgress,
    Wanted,
)
from lp_pipe.pipeline.results import StepResult, StepTrace
from lp_pipe.pipeline.saving.contents import Manifest
from lp_pipe.pipeline.worker.batch_source import BatchSource, target_checksum
from lp_pipe.rpc.remote_error import headline
from lp_pipe.telemetry import tracing
from lp_pipe.training.gradients import LossScale, total_norm

_log = logging.getLogger(__name__)


class Steps(ABC):
    """The steps of a pipeline, and how many are done. One thread calls the methods.

    done: the number of finished steps, which is the index of the next one.
    inconsistency: why the stages are not at the same step any more; None: they are.
    """

    def __init__(self, config: PipelineConfig, workers: Workers, feeder: Any) -> None:
        self._config = config
        self._workers = workers
        self._batches = BatchSource(feeder)
        ranks, placement = config.ranks, config.placement
        self._first, self._last = ranks.of(placement[0]), ranks.of(placement[-1])
        self.stragglers = Stragglers(config, workers)
        self._utilization = UtilizationLog(config)
        context().exit_stack.callback(self._utilization.close)
        self.done = 0
        self.inconsistency: str | None = None
        self._is_due_to_death = False
        self.scale = LossScale() if config.precision == "fp16" else None

    @abstractmethod
    def step(
        self, batch: tuple[Any, Any] | None, more: int = 0, wanted: Wanted = NOTHING_MORE
    ) -> tuple[StepResult, StepTrace]:
        """Take the next step. more: how many further steps the caller will ask for.

        Raises:
            EndOfData: the feeder has no more batches.
        """

    def go_on(self, count: int, batch: tuple[Any, Any] | None = None) -> list[StepTrace]:
        """Take `count` steps, each on this batch or on the feeder's next one; return their traces only."""
        return [self.step(batch, more)[1] for more in reversed(range(count))]

    @abstractmethod
    def settle(self) -> None:
        """Wait until steps that have begun are done, before another operation."""

    @abstractmethod
    def drop_lookahead(self) -> None:
        """Forget a step that was announced: the workers have dropped its first forwards."""

    def skip(self, why: str) -> StepResult:
        """Skip the next step: no batch and no update. The learning rate goes on as with a step."""
        self.drop_lookahead()
        failure = self._apply(None, skip=True)
        step, self.done = self.done, self.done + 1
        if failure is not None:
            raise failure
        log_metrics({"skipped": 1.0}, step)
        return StepResult(step, math.nan, skipped=True, why_skipped=why)

    @property
    def due(self) -> tuple[StepResult, ...]:
        """Return the results of finished steps that the caller has not got yet."""
        return ()

    def take_due(self) -> int:
        """Let a new loop begin with the results that are due; return how many they are."""
        return 0

    def manifest(self) -> Manifest:
        """Return what belongs to a checkpoint or mirror beside the workers' shares."""
        return Manifest(self.done, self._config.seed, self.scale, self.due)

    def go_to(self, found: Manifest) -> None:
        """Go on from a checkpoint or mirror."""
        self.done, self.inconsistency = found.step, None
        self._batches.drop_prefetched()
        if self.scale is not None:
            self.scale = found.loss_scale or LossScale()

    def mark_inconsistent(self, why: str, error: BaseException | None = None) -> None:
        """Note that the stages are not at the same step any more; `go_to` follows once they are."""
        what = f"{why}: {headline(error)}" if error is not None else why
        self.inconsistency, self._is_due_to_death = what, isinstance(error, Unavailable)

    @contextlib.contextmanager
    def inconsistent_on_failure(self, why: str) -> Iterator[None]:
        """Mark the stages inconsistent if the body fails, in which they change one by one."""
        try:
            yield
        except BaseException as error:  # layers may end in SystemExit, too
            self.mark_inconsistent(why, error)
            raise

    def check_consistent(self, *, only_reads: bool = False) -> None:
        """Refuse to go on while the stages are inconsistent; reading their weights is allowed, with a warning.

        Raises:
            PipelineError, Unavailable: they are; says why.
        """
        if self.inconsistency is not None and only_reads and not self._is_due_to_death:
            _log.warning("the stages are not at the same step (%s): what is read is a mixture", self.inconsistency)
        elif self.inconsistency is not None:
            # After a death, later operations fail because of it, and not for a reason of their own.
            kind = Unavailable if self._is_due_to_death else PipelineError
            raise kind(
                f"the stages are not at the same step any more ({self.inconsistency}): load() a checkpoint to go on; "
                "state_dict(), export(), forward() and evaluate() still work"
            )

    def _batch(self, step: int, batch: tuple[Any, Any] | None, *, input_grad: bool = False) -> tuple[Any, Any, int]:
        """Return input, target and number of micro-batches."""
        given = self._batches.get(step) if batch is None else batch
        if given is None:
            # A feeder that is a generator gives None after it has raised for another stage: that is no end of the data.
            self._workers.all(ConfirmEnd(step))
            raise EndOfData(f"the feeder has no batch for step {step}")
        value, target = check_pair(given, "step()")
        with noting(f"in the feeder's batch({step})" if batch is None else f"in the batch of step {step}"):
            input_dims, target_dims, _ = self._config.batch_dims
            value, target = marked(value, input_dims), marked(target, target_dims)
            microbatches = count((value, target), self._config.microbatches)
            value = without_graph(value, target, input_grad=input_grad)
            own, own_target = apart((value, target))
            return aligned(own), own_target, microbatches

    def _task_of(self, tag: int, step: int, batch: tuple[Any, Any, int], *, from_feeder: bool) -> StepTask:
        value, target, microbatches = batch
        return StepTask(tag, step, microbatches, (value,), (target,), target_checksum(target) if from_feeder else None)

    def _task(self, rank: int, task: StepTask, *, from_feeder: bool) -> StepTask:
        """Return the task without tensors that this rank does not need, or gets from the feeder itself."""
        sends = not from_feeder or rank == 0
        return task._replace(
            given=task.given if sends and rank in self._first else None,
            target=task.target if sends and rank in self._last else None,
        )

    def _apply(self, total_norm: Tensor | None, skip: bool) -> BaseException | None:
        """Let all workers do the update.

        Returns the error of a scheduler that has failed on all workers alike after the update. The stages are at the
        same step, so it is to be raised once the step counts as done.

        Raises:
            Exception: the update's own error. Either no stage has done the update, or they are inconsistent.
        """
        failure = None
        try:
            if self._config.zero:  # replicas wait for each other's updates
                self._workers.run(lambda tag, rank: Apply(self.done, total_norm, skip, tag))
            else:
                self._workers.all(Apply(self.done, total_norm, skip))
        except BaseException as error:  # an optimizer may end in SystemExit, too
            updates = self._update_progress()
            found = set(updates.values()) - {UpdateProgress.NOTHING_TO_DO}
            if found == {UpdateProgress.WITHOUT_SCHEDULER}:
                add_note(
                    error,
                    f"after the update of step {self.done}, alike on all stages: the weights are those after this "
                    "step, and can be read and saved",
                )
                failure = error
            elif updates and found <= {UpdateProgress.NOT_BEGUN}:
                self._workers.discard()
                raise
            else:
                self._mark_failed_update(self.done, error, updates)
                raise
        self._workers.new_tag()  # the step is done: what is discarded from now on belongs to another one
        return failure

    def _update_progress(self) -> dict[str, UpdateProgress]:
        """Return how far each worker has come with the update, by name; nothing if a worker has died."""
        try:
            return dict(self._workers.all(GetUpdateProgress()))
        except Unavailable:
            return {}

    def _mark_failed_update(
        self, step: int, error: BaseException, updates: Mapping[str, UpdateProgress] = MappingProxyType({})
    ) -> None:
        self.mark_inconsistent(f"an update has failed after it had changed some of them: step {step}", error)
        self.inconsistency = "; ".join(
            [str(self.inconsistency), *(f"{name} {update.value}" for name, update in updates.items())]
        )

    def _outcome(
        self, task: StepTask, reports: Sequence[Report], began: float, pipe_s: float, **more: Any
    ) -> tuple[StepResult, StepTrace]:
        step = task.step
        recorder = tracing.recorder
        if recorder is not None:
            recorder.add("step", tracing.STEP, began, time.monotonic(), step=step, microbatches=task.microbatches)
        self.stragglers.note(step, reports, task.microbatches)
        self._utilization.note(step, reports, pipe_s)
        loss, metrics = summed([reports[rank] for rank in self._last])
        utilization = tuple(report.busy_s / pipe_s for report in reports)
        spans, versions = ([tuple(getattr(r, name)) for r in reports] for name in ("spans", "versions"))
        return (
            StepResult(step=step, loss=loss, metrics=results(metrics), utilization=utilization, **more),
            StepTrace(step, began, tuple(spans), tuple(versions)),
        )


class SynchronousSteps(Steps):
    """Steps with one update each, after all gradients of the step."""

    def __init__(self, config: PipelineConfig, workers: Workers, feeder: Any) -> None:
        super().__init__(config, workers, feeder)
        self._on_nan = OnNan(config.on_nan, workers)

    def step(
        self, batch: tuple[Any, Any] | None, more: int = 0, wanted: Wanted = NOTHING_MORE
    ) -> tuple[StepResult, StepTrace]:
        """Take one step. more: makes no difference here."""
        start = time.monotonic()
        value, target, microbatches = self._batch(self.done, batch, input_grad=wanted.input_grad)
        task = self._task_of(0, self.done, (value, target, microbatches), from_feeder=batch is None)
        task = task._replace(wanted=wanted)
        # A copy: a layer may write to its input, and the search must see what the step has seen.
        again = task if self._config.on_nan == "ignore" else task._replace(given=(apart((value, value))[1],))
        scale = self.scale
        factor = scale.factor if scale is not None else None
        began = time.monotonic()

        def run(kind: type[Train] | type[SearchNonFinite], task: StepTask) -> list[Report]:
            def command_for(tag: int, rank: int) -> Command[Report]:
                return kind(self._task(rank, task._replace(tag=tag), from_feeder=batch is None), factor)

            return self._workers.run(command_for)

        reports = run(Train, task)
        pipe_s = time.monotonic() - began
        overflowed = any(report.overflowed for report in reports)
        with self._leaving_nothing():
            loss, _ = summed([reports[rank] for rank in self._last])
            why = self._on_nan.why_skipped(
                task.step, reports, loss, lambda: run(SearchNonFinite, again), is_scaled=scale is not None
            )
            norm = None if why else self._total_norm(reports)
        failure = self._apply(norm, overflowed or bool(why))
        if scale is not None:
            self.scale = scale.after(overflowed=overflowed)
        if self._config.shares_weights:
            with self.inconsistent_on_failure(f"step {task.step} has failed after the update, at the tied weights"):
                self._workers.run(lambda tag, _: ShareTiedWeights(tag))
        self.done += 1
        if failure is not None:
            raise failure
        seconds = time.monotonic() - start
        options: dict[str, Any] = {"seconds": seconds, "loss_scale": factor or 1.0, "skipped": overflowed or bool(why)}
        options |= {"why_skipped": why, "grad_norm": None if norm is None else norm.item()}
        if wanted.outputs:
            parts = {j: x for report in reports for j, x in report.outputs.items()}
            options["outputs"] = joined_outputs(parts, self._config.batch_dims[2])
        if wanted.input_grad:
            parts = {j: x for report in reports for j, x in report.input_gradients.items()}
            options["input_grad"] = joined_gradients(parts, value)
        return self._outcome(task, reports, began, pipe_s, **options)

    def settle(self) -> None:
        """Do nothing: no step runs on."""

    def drop_lookahead(self) -> None:
        """Do nothing: no step is announced."""

    @contextlib.contextmanager
    def _leaving_nothing(self) -> Iterator[None]:
        """Discard the gradients if the body fails: the next step would add to them."""
        try:
            yield
        except BaseException:
            self._workers.discard()
            raise

    def _total_norm(self, reports: Sequence[Report]) -> Tensor | None:
        """Return the norm of all gradients, from the parameters' norms in the order of one process."""
        norms = self._config.names.whole_of_parameters(report.gradient_norms for report in reports)
        return total_norm(list(norms.values()), self._workers.own.device)


def summed(reports: Sequence[Report]) -> tuple[float, Totals]:
    """Return loss and metrics of the last stage's replicas, added up in rank order."""
    return sum(report.loss for report in reports), merged(report.metrics for report in reports)


class ForwardOnlySteps(SynchronousSteps):
    """Refuses steps; the pipeline is for inference, and all other operations are as between two steps."""

    def step(self, batch: tuple[Any, Any] | None, more: int = 0, wanted: Wanted = NOTHING_MORE) -> NoReturn:
        """Refuse to take a step.

        Raises:
            ScheduleError: says what such a pipeline is for.
        """
        name = self._config.schedule_for(self._config.microbatches).name
        raise ScheduleError(
            f"schedule {name!r} has no backwards: the pipeline can forward(), forward_stream() and evaluate(), but "
            "takes no steps. To train, use another schedule, such as schedule='1f1b'"
        )
