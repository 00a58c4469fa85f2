"""Micro-batches for a worker's operations, on its device."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from lp_pipe.errors import PipelineError, noting
from lp_pipe.pipeline.config import PipelineConfig
from lp_pipe.pipeline.layers.batch_dims import marked, unmarked
from lp_pipe.pipeline.layers.microbatches import apart, loss_weights, split
from lp_pipe.pipeline.protocol import NOTHING_MORE, Report, StepTask, Wanted
from lp_pipe.pipeline.worker.batch_source import BatchSource, target_checksum
from lp_pipe.pipeline.worker.execution import Operation
from lp_pipe.training.device import to_device


def _each(change: Callable[[Any], Any], inputs: list[Any] | Mapping[int, Any]) -> list[Any] | dict[int, Any]:
    if isinstance(inputs, Mapping):
        return {index: change(value) for index, value in inputs.items()}
    return [change(value) for value in inputs]


class MicrobatchSource:
    """Makes the operations of the worker `name`. Stages that are neither first nor last need no batch."""

    def __init__(
        self, config: PipelineConfig, stages: Collection[int], feeder: Any, name: str, device: torch.device
    ) -> None:
        self._config = config
        self._stages = stages
        self._batches = BatchSource(feeder)
        self._name = name
        self._device = device
        self.drop_prefetched = self._batches.drop_prefetched
        self.confirm_end = self._batches.confirm_end

    def operation(self, task: StepTask, scale: float | None = None) -> Operation:
        """Return the operation for a step of training."""
        with noting(f"in {self._name}, before the first micro-batch of step {task.step}"):  # loss_weight is the user's
            inputs, targets = self._batch(task)
            return self.of(task.tag, task.step, inputs, targets, scale, task.wanted)

    def of(
        self,
        tag: int,
        step: int,
        inputs: list[Any] | Mapping[int, Any],
        targets: list[Any],
        scale: float | None = None,
        wanted: Wanted = NOTHING_MORE,
    ) -> Operation:
        """Return an operation with these micro-batches."""
        _, target_dims, _ = self._config.batch_dims
        targets = [marked(target, target_dims) for target in targets]
        weights = loss_weights(targets, self._config.loss_weight) if targets else []
        inputs, targets = to_device(_each(unmarked, inputs), self._device), to_device(targets, self._device)
        return Operation(tag, step, inputs, targets, weights, Report(), scale, wanted=wanted)

    def weigh_in_groups(self, operation: Operation, size: int) -> None:
        """Weigh the gradients of each group of `size` micro-batches as those of a step; the report has the mean."""
        targets, rule = operation.targets, self._config.loss_weight
        if rule == "one" and targets:
            operation.weights = [1 / len(targets)] * len(targets)
        weights: list[float] = []
        for first in range(0, len(targets), size):
            group = targets[first : first + size]
            last = first + len(group) - 1
            which = f"micro-batch {first}" if first == last else f"micro-batches {first} to {last}"
            what = f"{which} of step {operation.step}, for which an asynchronous schedule makes an update,"
            weights += loss_weights(group, rule, what)
        operation.gradient_weights = weights

    def _batch(self, task: StepTask) -> tuple[list[Any], list[Any]]:
        """Return the micro-batches' inputs and targets, as far as this worker's stages need them."""
        given, target = task.given, task.target
        needs_input, needs_target = 0 in self._stages, self._config.last_stage in self._stages
        if (needs_input and given is None) or (needs_target and target is None):
            value, label = self._from_feeder(task)
            if needs_input and needs_target:
                value, label = apart((value, label))
            given, target = given or (value,), target or (label,)
        # Move, then split, as a loop in one process does: kernels choose by address, and a slice's is not a copy's.
        input_dims, target_dims, _ = self._config.batch_dims
        inputs, targets = [], []
        if needs_input and given:
            inputs = split(marked(to_device(given[0], self._device), input_dims), self._config.microbatches)
        if needs_target and target:
            targets = split(marked(target[0], target_dims), self._config.microbatches)
        for part, pieces in (("input", inputs), ("target", targets)):
            if pieces and len(pieces) != task.microbatches:
                raise PipelineError(
                    f"step {task.step}: the batch's input splits into {task.microbatches} micro-batches, the {part} "
                    f"that {self._name} got into {len(pieces)}: give both the same first dimension, and let "
                    "batch(step) be a pure function of the step"
                )
        return inputs, targets

    def _from_feeder(self, task: StepTask) -> tuple[Any, Any]:
        batch = self._batches.get(task.step)
        if batch is None:
            raise PipelineError(
                f"the feeder gave the first stage a batch for step {task.step}, and {self._name} None: "
                "batch(step) must be a pure function of the step"
            )
        if task.target_checksum is not None and target_checksum(batch[1]) != task.target_checksum:
            raise PipelineError(
                f"step {task.step}: the feeder's target was another one when {self._name} asked for it than when the "
                "first stage did: both ask, so that batch(step) must be a pure function of the step: choose samples by "
                "the step's number, not by next(iterator), and seed what is random by it"
            )
        return batch
