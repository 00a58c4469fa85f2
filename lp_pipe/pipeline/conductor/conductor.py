"""The conductor of a pipeline: starts every operation on all workers, and lets each happen on all or on none.

It is part of the first worker's node.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from lp_pipe.address import Address
from lp_pipe.context import context
from lp_pipe.errors import PipelineError, Unavailable
from lp_pipe.pipeline.conductor.async_steps import AsynchronousSteps
from lp_pipe.pipeline.conductor.evaluation import RunningEvaluation, WindowMeans, checked_window, result_of
from lp_pipe.pipeline.conductor.mirrors import StageMirrors, check_guards
from lp_pipe.pipeline.conductor.steps import ForwardOnlySteps, Steps, SynchronousSteps, summed
from lp_pipe.pipeline.conductor.whole_model import Copy, WholeModel
from lp_pipe.pipeline.conductor.workers import Workers
from lp_pipe.pipeline.config import PipelineConfig, WorkerConfig
from lp_pipe.pipeline.layers.batch_dims import marked
from lp_pipe.pipeline.layers.microbatches import apart, loss_weights, total_weight
from lp_pipe.pipeline.loss_metrics import scaled
from lp_pipe.pipeline.protocol import (
    Change,
    ChangeModules,
    GetLearningRates,
    GetMirror,
    GetSchedulerKind,
    GetSettings,
    Infer,
    IsAsBuilt,
    Join,
    KeepMirror,
    LoadState,
    Mirror,
    Ping,
    Reconnect,
    Report,
    RestoreSettings,
    StartMetering,
    StepScheduler,
    StopMetering,
    Wanted,
)
from lp_pipe.pipeline.results import EvalResult, StageMemory, StepResult, StepTrace, Straggler
from lp_pipe.pipeline.saving import safetensors_file
from lp_pipe.pipeline.saving.contents import Manifest
from lp_pipe.pipeline.worker.channel_handle import ChannelTarget
from lp_pipe.pipeline.worker.worker import StageWorker
from lp_pipe.rpc import CourierClient
from lp_pipe.rpc.daemon_pool import DaemonPool

T = TypeVar("T")


class Conductor:
    """The server of PipelineClients; `PipelineClient` says what each operation does.

    Operations run one after another, in order of arrival.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        worker: WorkerConfig,
        channels: Address,
        neighbours: Mapping[int, ChannelTarget],
        peers: Sequence[CourierClient],
        feeder: Any = None,
    ) -> None:
        self._workers = Workers(StageWorker(pipeline, worker, channels, neighbours, feeder), peers)
        self._model = WholeModel(pipeline, self._workers)
        self._config = pipeline
        self._are_joined = False
        self._last = pipeline.ranks.of(pipeline.placement[-1])
        self._steps: Steps = _kind_of_steps(pipeline)(pipeline, self._workers, feeder)
        self._mirrors = StageMirrors(self._workers, self._steps)
        self._evaluations: dict[str, RunningEvaluation] = {}
        self._results_of_evaluations: dict[str, Future[EvalResult]] = {}
        self._queue = DaemonPool(1, "pipeline operations")
        context().exit_stack.callback(self._queue.close)
        # No client before all layers are built: in thread mode they draw from the generator that a script may use.
        with contextlib.suppress(Unavailable):  # the first operation will tell of a worker that has failed already
            self._workers.all(Ping())

    def step(
        self, batch: tuple[Any, Any] | None = None, more: int = 0, outputs: bool = False, input_grad: bool = False
    ) -> StepResult:
        """Take one step. more: further steps on the feeder's batches that the caller will ask for."""
        wanted = Wanted(outputs, input_grad)
        return self._in_turn(lambda: self._steps.step(batch, more, wanted)[0], may_run_on=True)

    def due(self) -> int:
        """Return how many results of finished steps a loop that begins now gets first."""
        return self._in_turn(self._steps.take_due, may_run_on=True)

    def skip_step(self, why: str) -> StepResult:
        """Skip the next step: no batch and no update."""
        return self._in_turn(lambda: self._steps.skip(why))

    def scheduler_step(self, metric: float) -> None:
        """Step a scheduler that waits for a metric, on all workers."""
        self._in_turn(lambda: self._scheduler_step(metric))

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rates of the next step, by parameter, in the order of state_dict."""
        return self._in_turn(self._learning_rates, only_reads=True)

    def stragglers(self) -> list[Straggler]:
        """Return the workers that are much slower than expected."""
        return self._steps.stragglers.now

    def trace(self, steps: int, batch: tuple[Any, Any] | None) -> list[StepTrace]:
        """Take some steps; return the start and end of every action."""
        return self._in_turn(lambda: self._steps.go_on(steps, batch))

    def profile_memory(self, steps: int, batch: tuple[Any, Any] | None) -> list[StageMemory]:
        """Take some steps; return what each worker held in memory."""
        return self._in_turn(lambda: self._profile_memory(steps, batch))

    def evaluate(self, batches: Sequence[tuple[Any, Any]]) -> EvalResult:
        """Return mean loss and metrics over the batches, weighted as `loss_weight` says."""
        return self._in_turn(lambda: result_of([self._evaluate(batches)]), only_reads=True)

    def evaluation(self, number: str) -> Generator[None, None, None]:
        """Begin an evaluation of what `evaluate_window` brings, until `end_evaluation` or the end of this stream.

        The stream also ends with the client's connection: a client that dies does not hold up others.
        """
        evaluation = self._evaluations[number] = RunningEvaluation()
        result = self._begin_in_turn(lambda: evaluation.run(self._evaluate), only_reads=True)
        self._results_of_evaluations[number] = result
        try:
            while True:
                yield
        finally:
            evaluation.end()
            del self._evaluations[number], self._results_of_evaluations[number]

    def evaluate_window(self, number: str, batches: Sequence[tuple[Any, Any]]) -> "Future[None]":
        """Evaluate further batches; the reply comes when they are done."""
        return self._evaluations[number].add(batches)

    def end_evaluation(self, number: str) -> "Future[EvalResult]":
        """Return the means over all windows, and let other operations go on."""
        self._evaluations[number].end()
        return self._results_of_evaluations[number]

    def forward_many(self, values: Sequence[Any]) -> list[Any]:
        """Return the outputs in eval mode for several inputs, which follow each other through the stages."""
        return self._in_turn(lambda: self._outputs(values), only_reads=True)

    def worker_count(self) -> int:
        """Return how many inputs the stages can work on at a time."""
        return self._config.ranks.world_size

    def apply(self, change: Change) -> list[Any]:
        """Call a function with the modules of every worker; return its results, by worker."""
        return self._in_turn(lambda: self._apply(change))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's parameters and buffers."""
        return self._in_turn(self._model.copied_state, only_reads=True)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace the whole model's parameters and buffers."""
        self._in_turn(lambda: self._load_state_dict(state))

    def save(self, path: str) -> None:
        """Write a checkpoint folder."""
        self._in_turn(lambda: self._model.save(Path(path), self._steps.manifest()))

    def copy(self) -> Copy:
        """Copy what `save` would write, in memory."""
        return self._in_turn(lambda: self._model.copy(self._steps.manifest()))

    def write_copy(self, path: str, copy: Copy) -> list[str]:
        """Write what `copy` has returned, while operations go on; return the names of the files."""
        return self._model.write_copy(Path(path), copy)

    def load(self, path: str, strict: bool = True) -> None:
        """Go on from a checkpoint folder, whatever number of stages wrote it."""
        self._in_turn(lambda: self._load(Path(path), strict=strict), may_be_inconsistent=True)

    def mirror(self, me: CourierClient) -> int:
        """Let each worker copy its state, for itself and its guard; return the step. me: a client of this node.

        Raises:
            PipelineError: the pipeline has one worker only.
        """
        check_guards(self._config.ranks.world_size)
        return self._in_turn(lambda: self._mirrors.make(me))

    # The last worker sends these commands. They are coroutines, so that it is answered when all threads of this server
    # wait for an operation: one of these operations may wait for that worker.

    async def keep_mirror(self, command: KeepMirror) -> None:
        """Do the command on this node's worker."""
        self._workers.own.do(command)

    async def get_mirror(self, command: GetMirror) -> Mirror:
        """Do the command on this node's worker."""
        return self._workers.own.do(command)

    def mirrored_steps(self) -> list[int]:
        """Return the steps to which all workers can go back."""
        return self._in_turn(self._mirrors.steps, may_be_inconsistent=True)

    def go_back(self, step: int, me: CourierClient) -> None:
        """Go on from a mirrored step. me: a client of this node."""
        self._in_turn(lambda: self._mirrors.go_back(step, me), may_be_inconsistent=True)

    def recover(self) -> None:
        """Join the workers again, after one was restarted."""
        self._in_turn(self._recover, may_be_inconsistent=True)

    def export(self, path: str) -> None:
        """Write the whole model as one .safetensors file."""
        self._in_turn(
            lambda: safetensors_file.write(Path(path), self._model.state_dict(), self._steps.done), only_reads=True
        )

    def fingerprint(self) -> str:
        """Return the sha256 of all parameters and buffers."""
        return self._in_turn(self._model.fingerprint, only_reads=True)

    def current_step(self) -> int:
        """Return the number of finished steps, which is the index of the next one."""
        return self._in_turn(lambda: self._steps.done, may_be_inconsistent=True)

    def _in_turn(self, operation: Callable[[], T], **options: bool) -> T:
        """Run an operation after those before it. options: as for `_begin_in_turn`."""
        return self._begin_in_turn(operation, **options).result()

    def _begin_in_turn(
        self,
        operation: Callable[[], T],
        *,
        may_be_inconsistent: bool = False,
        may_run_on: bool = False,
        only_reads: bool = False,
    ) -> "Future[T]":
        """Let an operation run after those before it.

        may_be_inconsistent: allow it while the stages are not at the same step.
        may_run_on: allow it while a step that was begun ahead is going on.
        only_reads: the operation reads the stages' weights; while they are inconsistent there is a warning.
        """

        def in_order() -> T:
            if not may_be_inconsistent:
                self._steps.check_consistent(only_reads=only_reads)
                self._join()
            if not may_run_on:
                with contextlib.suppress(BaseException) if may_be_inconsistent else contextlib.nullcontext():
                    self._steps.settle()
            return operation()

        return self._queue.start(in_order)

    def _join(self) -> None:
        """Let all workers join, once: a worker that was restarted since has not joined, and is found out by that."""
        if not self._are_joined:
            self._workers.all(Join())
            self._are_joined = True

    def _scheduler_step(self, metric: float) -> None:
        self._refuse_useless_metric()
        with self._steps.inconsistent_on_failure("scheduler_step() has failed after it may have changed some of them"):
            self._workers.all(StepScheduler(metric))

    def _refuse_useless_metric(self) -> None:
        """Refuse `scheduler_step` if no worker has a scheduler that waits for a metric.

        Raises:
            PipelineError: says which schedulers the workers have.
        """
        if self._config.lr_scheduler is None:
            raise PipelineError(
                "scheduler_step(): the model has no lr_scheduler. Give it one whose step() takes a metric, such as "
                "lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau"
            )
        found = [kind for kind in self._workers.all(GetSchedulerKind()) if kind is not None]
        if not any(kind.waits_for_metric for kind in found):
            kinds = ", ".join(sorted({kind.name for kind in found})) or "none, as nothing is trained"
            raise PipelineError(
                f"scheduler_step(): the model's scheduler ({kinds}) needs no metric: every training step steps it. "
                "Leave out the call, or give the model a scheduler whose step() takes one, such as ReduceLROnPlateau"
            )

    def _learning_rates(self) -> dict[str, float]:
        return self._config.names.whole(self._workers.some(self._config.ranks.firsts, GetLearningRates()))

    def _apply(self, change: Change) -> list[Any]:
        self._steps.drop_lookahead()
        settings = self._workers.all(GetSettings())
        try:
            results = self._workers.all(ChangeModules(change, self._steps.done))
        except BaseException as error:  # the function may end in SystemExit, too
            with self._steps.inconsistent_on_failure("apply() has failed after it may have changed some of them"):
                undone = self._workers.each(range(len(settings)), [RestoreSettings(one) for one in settings])
            if any(undone):
                self._steps.mark_inconsistent("apply() has failed after it had changed tensors of some of them", error)
            raise
        self._mirrors.forget()
        return results

    def _load_state_dict(self, state: dict[str, Tensor]) -> None:
        whole = self._model.checked(state)
        self._mirrors.forget()
        with self._steps.inconsistent_on_failure("load_state_dict() has failed after it may have changed some of them"):
            self._workers.all(LoadState(whole))
        self._steps.drop_lookahead()

    def _load(self, path: Path, *, strict: bool) -> None:
        found = self._model.read(path, strict=strict)
        self._mirrors.forget()
        with self._steps.inconsistent_on_failure(f"loading {path} has failed after it had changed some of them"):
            self._model.adopt()
        self._steps.go_to(found)

    def _recover(self) -> None:
        self._workers.all(Ping())  # waits for workers that are starting
        self._workers.all(Reconnect(f", {time.time_ns()}"))
        self._are_joined = True
        self._mirrors.guard_anew()
        self._steps.stragglers.begin_again()
        self._steps.go_to(Manifest(0, self._config.seed))
        if not all(self._workers.all(IsAsBuilt())):
            self._steps.mark_inconsistent("a worker was restarted with the initial weights")

    def _profile_memory(self, steps: int, batch: tuple[Any, Any] | None) -> list[StageMemory]:
        self._steps.drop_lookahead()
        self._workers.all(StartMetering())
        try:
            self._steps.go_on(steps, batch)
        finally:
            found = self._workers.all(StopMetering())
        return found

    def _evaluate(self, batches: Sequence[tuple[Any, Any]]) -> WindowMeans:
        pairs = checked_window(batches)
        targets = [marked(target, self._config.batch_dims[1]) for _, target in pairs]
        loss, metrics = summed(self._infer([value for value, _ in pairs], targets))
        rule = self._config.loss_weight
        share = sum(loss_weights(targets, rule))
        return WindowMeans(loss / share, scaled(metrics, 1 / share), total_weight(targets, rule))

    def _infer(self, inputs: list[Any], targets: list[Any]) -> list[Report]:
        """Run forwards; return the reports of the last stage's replicas."""
        self._steps.drop_lookahead()
        own = apart([*inputs, *targets])
        inputs, targets = own[: len(inputs)], own[len(inputs) :]
        ranks, worker_of_inputs = self._config.ranks, self._config.placement[0]
        reports = self._workers.run(
            lambda tag, rank: Infer(
                tag,
                len(inputs),
                {j: x for j, x in enumerate(inputs) if ranks.for_microbatch(worker_of_inputs, j) == rank},
                targets if rank in self._last else [],
            )
        )
        return [reports[rank] for rank in self._last]

    def _outputs(self, values: Sequence[Any]) -> list[Any]:
        found = {j: output for report in self._infer(list(values), []) for j, output in report.outputs.items()}
        return [found[j] for j in range(len(values))]


def _kind_of_steps(pipeline: PipelineConfig) -> type[Steps]:
    if pipeline.forward_only:
        return ForwardOnlySteps
    return AsynchronousSteps if pipeline.is_asynchronous else SynchronousSteps
