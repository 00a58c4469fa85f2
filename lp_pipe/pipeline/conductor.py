"""The first worker's second job: it starts every operation on all workers, and makes each a whole or nothing."""

import contextlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lp_pipe.address import Address
from lp_pipe.context import context
from lp_pipe.errors import EndOfData, PipelineError, Unavailable
from lp_pipe.pipeline import safetensors_file
from lp_pipe.pipeline.batches import BatchSource
from lp_pipe.pipeline.channel_handle import ChannelTarget
from lp_pipe.pipeline.config import PipelineConfig, WorkerConfig
from lp_pipe.pipeline.execution import Report
from lp_pipe.pipeline.loss_scale import LossScale
from lp_pipe.pipeline.microbatches import aligned, check_pair, loss_weights, split
from lp_pipe.pipeline.results import EvalResult, StageMemory, StepResult, StepTrace
from lp_pipe.pipeline.whole_model import WholeModel
from lp_pipe.pipeline.worker import StageWorker
from lp_pipe.pipeline.workers import Workers
from lp_pipe.rpc.pool import DaemonPool

T = TypeVar("T")


class Conductor:
    """What a PipelineClient talks to. Operations run one after another, in order of arrival."""

    def __init__(
        self,
        pipeline: PipelineConfig,
        worker: WorkerConfig,
        channels: Address,
        neighbours: Mapping[int, ChannelTarget],
        peers: Sequence[Any],
        feeder: Any = None,
    ) -> None:
        self._workers = Workers(StageWorker(pipeline, worker, channels, neighbours, feeder), peers)
        self._model = WholeModel(pipeline, self._workers)
        self._config = pipeline
        ranks, placement = pipeline.ranks, pipeline.placement
        self._first, self._last = ranks.of(placement[0]), ranks.of(placement[-1])
        self._batches = BatchSource(feeder)
        self._step = 0
        self._scale = LossScale() if pipeline.precision == "fp16" else None
        self._torn: str | None = None
        self._queue = DaemonPool(1, "pipeline operations")
        context().exit_stack.callback(self._queue.close)

    def step(self, batch: tuple[Any, Any] | None = None) -> StepResult:
        """One optimizer step; see PipelineClient."""
        return self._in_turn(lambda: self._train(batch)[0])

    def trace(self, steps: int) -> list[StepTrace]:
        """Some steps, with the start and end of every action."""
        return self._in_turn(lambda: [self._train(None)[1] for _ in range(steps)])

    def profile_memory(self, steps: int) -> list[StageMemory]:
        """What each worker holds in memory during some steps."""
        return self._in_turn(lambda: self._profile_memory(steps))

    def evaluate(self, batches: Sequence[tuple[Any, Any]]) -> EvalResult:
        """Mean loss and metrics over the batches, each one weighted as `loss_weight` says."""
        return self._in_turn(lambda: self._evaluate(batches))

    def forward(self, value: Any) -> Any:
        """The model's output in eval mode."""
        return self.forward_many([value])[0]

    def forward_many(self, values: Sequence[Any]) -> list[Any]:
        """The outputs for several inputs, which follow each other through the stages."""
        return self._in_turn(lambda: self._outputs(values))

    def worker_count(self) -> int:
        """How many inputs the stages can work on at a time."""
        return self._config.ranks.world_size

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's parameters and buffers."""
        return self._in_turn(self._model.copied_state)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace the whole model's parameters and buffers."""
        self._in_turn(lambda: self._model.load_state_dict(state))

    def save(self, path: str) -> None:
        """Write a checkpoint folder; the manifest, written last, makes it one."""
        self._in_turn(lambda: self._model.save(Path(path), self._step, self._scale))

    def load(self, path: str) -> None:
        """Go on from a checkpoint folder, whatever number of stages wrote it."""
        self._in_turn(lambda: self._load(Path(path)), may_be_torn=True)

    def export(self, path: str) -> None:
        """Write the whole model as one .safetensors file."""
        self._in_turn(lambda: safetensors_file.write(Path(path), self._model.state_dict(), self._step))

    def fingerprint(self) -> str:
        """sha256 over all parameters and buffers."""
        return self._in_turn(self._model.fingerprint)

    def current_step(self) -> int:
        """The number of finished steps, which is the index of the next one."""
        return self._in_turn(lambda: self._step, may_be_torn=True)

    def _in_turn(self, operation: Callable[[], T], *, may_be_torn: bool = False) -> T:
        future: Future[T] = Future()
        self._queue.submit(_settle, future, operation if may_be_torn else self._unless_torn(operation))
        return future.result()

    def _unless_torn(self, operation: Callable[[], T]) -> Callable[[], T]:
        def checked() -> T:
            if self._torn is not None:
                raise PipelineError(
                    f"an update has failed after it had changed some stages ({self._torn}), which are not at the same "
                    "step any more: load() a checkpoint to go on"
                )
            return operation()

        return checked

    def _train(self, batch: tuple[Any, Any] | None) -> tuple[StepResult, StepTrace]:
        start = time.monotonic()
        given = batch
        if given is None:
            given = self._batches.get(self._step)
            if given is None:
                raise EndOfData(f"the feeder has no batch for step {self._step}")
        value, target = check_pair(given, "step()")
        value = aligned(value)
        microbatches = len(split(value, self._config.microbatches))
        scale = self._scale
        began = time.monotonic()
        reports = self._workers.run(
            lambda worker, tag, rank: worker.train(
                tag,
                self._step,
                microbatches,
                (value,) if rank in self._first and (batch is not None or rank == 0) else None,
                (target,) if rank in self._last and (batch is not None or rank == 0) else None,
                scale.factor if scale is not None else None,
            )
        )
        pipe_s = time.monotonic() - began
        overflowed = any(report.overflowed for report in reports)
        self._apply(self._total_norm(reports), overflowed)
        if scale is not None:
            self._scale = scale.after(overflowed=overflowed)
        if self._config.shares_weights:
            self._workers.run(lambda worker, tag, _: worker.share_weights(tag))
        loss, metrics = _summed([reports[rank] for rank in self._last])
        result = StepResult(
            step=self._step,
            loss=loss,
            metrics=metrics,
            seconds=time.monotonic() - start,
            utilization=tuple(report.busy_s / pipe_s for report in reports),
            loss_scale=scale.factor if scale is not None else 1.0,
            skipped=overflowed,
        )
        self._step += 1
        return result, StepTrace(result.step, began, tuple(tuple(report.spans) for report in reports))

    def _total_norm(self, reports: Sequence[Report]) -> Tensor | None:
        """Of all gradients, from those of the parameters in their order, as one process has them."""
        by_stage = {stage: norms for report in reports for stage, norms in report.gradient_norms.items()}
        # Where the stages compute, as their plain loop does.
        norms = [self._workers.own.on_device(norm) for stage in sorted(by_stage) for norm in by_stage[stage]]
        return torch.linalg.vector_norm(torch.stack(norms)).cpu() if norms else None

    def _apply(self, total_norm: Tensor | None, skip: bool) -> None:
        try:
            self._workers.all("apply", total_norm, skip)
        except Exception as error:
            with contextlib.suppress(Unavailable):  # a worker that has died ends the program
                if any(self._workers.all("has_updated")):
                    self._torn = f"step {self._step}, {traceback.format_exception_only(error)[0].splitlines()[0]}"
                else:
                    self._workers.all("discard")
            raise

    def _load(self, path: Path) -> None:
        found = self._model.load(path)
        self._step = found.step
        self._torn = None
        if self._scale is not None:
            self._scale = LossScale(*found.loss_scale) if found.loss_scale is not None else LossScale()

    def _profile_memory(self, steps: int) -> list[StageMemory]:
        self._workers.all("start_metering")
        try:
            for _ in range(steps):
                self._train(None)
        finally:
            found: list[StageMemory] = self._workers.all("stop_metering")
        return found

    def _evaluate(self, batches: Sequence[tuple[Any, Any]]) -> EvalResult:
        pairs = [check_pair(batch, "evaluate()") for batch in batches]
        if not pairs:
            raise PipelineError("evaluate() needs at least one (input, target) pair")
        targets = [target for _, target in pairs]
        loss, metrics = _summed(self._infer([value for value, _ in pairs], targets))
        total = sum(loss_weights(targets, self._config.loss_weight))
        return EvalResult(loss / total, {name: value / total for name, value in metrics.items()})

    def _infer(self, inputs: list[Any], targets: list[Any]) -> list[Report]:
        """Run forwards; the reports of the last stage's replicas."""
        ranks, worker_of_inputs = self._config.ranks, self._config.placement[0]
        reports = self._workers.run(
            lambda worker, tag, rank: worker.infer(
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


def _summed(reports: Sequence[Report]) -> tuple[float, dict[str, float]]:
    """Loss and metrics of the last stage's replicas, added up in rank order."""
    first, *others = reports
    loss, metrics = first.loss, dict(first.metrics)
    for report in others:
        loss += report.loss
        for name, value in report.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
    return loss, metrics


def _settle(future: "Future[T]", operation: Callable[[], T]) -> None:
    try:
        result = operation()
    except BaseException as error:  # belongs to the caller, whose handler raises it
        future.set_exception(error)
    else:
        future.set_result(result)
