"""The results of a pipeline's operations. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step.

    step: its index, from 0, as the feeder was asked.
    loss: weighted sum of the micro-batches' losses.
    metrics: what the loss function returned beside it: of plain values the mean, weighted as the losses are, over the
        micro-batches that have them; pp.Sum, pp.Max and pp.Mean as they say. Floats, or tensors on the CPU.
    seconds: from the request for the batch to the end of the update.
    utilization: for each stage worker, the share of the pipeline's time that it computed.
    loss_scale: what the losses were multiplied by for the backwards (precision="fp16"; otherwise 1). `loss` is without
        it.
    skipped: the parameters are as before, because gradients were too large for that scale (the next step's is smaller),
        or because of what `why_skipped` says.
    grad_norm: of all gradients, over all stages and before they are clipped, as torch's clip_grad_norm_ returns it.
        None without `clip_grad_norm` (an infinite one only measures), and in steps that `why_skipped` explains.
    outputs: with `step(outputs=True)` the last layer's output of the whole batch, before the update; on the CPU.
    input_grad: with `step(input_grad=True)` the gradient of `loss` by the batch's input, in the input's structure; None
        for values that are no floating-point tensors.

    The learning rate is not in it: between two steps `PipelineClient.learning_rates()` has those of the next one.
    """

    step: int
    loss: float
    metrics: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    utilization: tuple[float, ...] = ()
    loss_scale: float = 1.0
    skipped: bool = False
    why_skipped: str = ""
    grad_norm: float | None = None
    outputs: Any = None
    input_grad: Any = None

    @property
    def bubble_fraction(self) -> float:
        """The measured idle share of the stages; (p - 1)/(m + p - 1) in theory for GPipe and 1F1B."""
        return 1.0 - sum(self.utilization) / len(self.utilization) if self.utilization else 0.0


@dataclass(frozen=True)
class StageMemory:
    """The memory of a stage worker, in bytes.

    stages: the virtual stages that it runs.
    gradient_bytes: before an update, at the end of a step or (asynchronous schedules) within it.
    activation_bytes: the largest amount at a time that autograd had saved for backwards, that recompute kept for them,
        or that waited for a W; memory that several such tensors share counts once, that of parameters, buffers and
        batches does not count.
    stash_bytes: the part of it that one micro-batch's forward leaves on one stage, at most.
    deferred_bytes: what an I adds to that until its W: the gradients that its layers' weights need, less what it frees.
    weight_version_bytes: the largest amount at a time of older weights that an asynchronous schedule keeps for its
        forwards and backwards; parameter_bytes are those of the newest.
    """

    worker: int
    replica: int
    stages: tuple[int, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    activation_bytes: int
    stash_bytes: int
    weight_version_bytes: int = 0
    deferred_bytes: int = 0


@dataclass(frozen=True)
class Straggler:
    """A stage worker that takes much longer than expected, in seconds of computation per micro-batch.

    node, host: "stages/1" and where it runs.
    stages: the virtual stages that it runs.
    since: the step after which it was found.
    expected_by: the source of the expectation: "by the plan", "by its first steps", "by the other replicas of its
        stage".
    """

    node: str
    host: str
    worker: int
    replica: int
    stages: tuple[int, ...]
    since: int
    measured_seconds: float
    expected_seconds: float
    expected_by: str

    def __str__(self) -> str:
        ratio = self.measured_seconds / self.expected_seconds
        stages = f"stage{'s' if len(self.stages) > 1 else ''} {', '.join(map(str, self.stages))}"
        return (
            f"{self.node} on {self.host} ({stages}, replica {self.replica}) is {ratio:.1f} times slower than expected: "
            f"{_milliseconds(self.measured_seconds)} per micro-batch instead of "
            f"{_milliseconds(self.expected_seconds)} ({self.expected_by})"
        )


class NonFinite(NamedTuple):
    """The place where a step met NaN or infinity.

    what: which tensor, in words.
    node: the stage worker.
    layer: its index in the model; the number of layers stands for the loss function.
    """

    is_backward: bool
    microbatch: int
    layer: int
    layer_name: str
    stage: int
    node: str
    what: str


class EvalResult(NamedTuple):
    """The means over the batches that were evaluated; metrics as in `StepResult`."""

    loss: float
    metrics: Mapping[str, Any]


class StepTrace(NamedTuple):
    """The actions of one step: for each worker (action, start, end) in time.monotonic() seconds of its host.

    versions: of an asynchronous schedule, for each worker (action, version of the weights that it used); a version is
        the number of updates that made it.
    """

    step: int
    began: float
    workers: tuple[tuple[tuple[str, float, float], ...], ...]
    versions: tuple[tuple[tuple[str, int], ...], ...] = ()


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
