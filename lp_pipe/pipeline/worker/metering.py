"""Measures what a stage worker has in memory during its steps, when it is asked to."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn

from lp_pipe.pipeline.compute.activation_meter import ActivationMeter, bytes_of
from lp_pipe.pipeline.results import StageMemory
from lp_pipe.pipeline.schedule import Action
from lp_pipe.pipeline.worker.execution import Hook, Operation, RunAction
from lp_pipe.pipeline.worker.training import Training
from lp_pipe.private_torch import buffers_of, parameters_of, pytree


class Metering(Hook):
    """Measures memory of the worker with these modules. place: (worker, replica). stages: its virtual stages."""

    def __init__(
        self, modules: Sequence[nn.Module], training: Training, place: tuple[int, int], stages: Sequence[int]
    ) -> None:
        self._modules = modules
        self._training = training
        self._place = place
        self._stages = tuple(stages)
        self._meter: ActivationMeter | None = None
        self._gradient_bytes = self._version_bytes = 0

    def start(self) -> None:
        """Measure the next steps."""
        self._meter = ActivationMeter()
        self._gradient_bytes = self._version_bytes = 0

    def stop(self) -> StageMemory:
        """Return what was measured since `start`."""
        meter, self._meter = self._meter, None
        assert meter is not None, "stop comes after start"
        parameters, _, state = self._training.bytes()
        buffers = sum(
            bytes_of(buffer) for m in self._modules for buffer in buffers_of(m).values() if buffer is not None
        )
        worker, replica = self._place
        return StageMemory(
            worker=worker,
            replica=replica,
            stages=self._stages,
            parameter_bytes=parameters,
            gradient_bytes=self._gradient_bytes,
            optimizer_bytes=state,
            buffer_bytes=buffers,
            activation_bytes=meter.peak_bytes,
            stash_bytes=meter.stash_bytes,
            weight_version_bytes=self._version_bytes,
            deferred_bytes=meter.deferred_bytes,
        )

    @property
    def is_on(self) -> bool:
        """Whether the next steps are measured."""
        return self._meter is not None

    def operation(self) -> AbstractContextManager[object]:
        assert self._meter is not None, "steps are measured after start"
        return self._meter.counting()

    def around(self, run: RunAction, action: Action, operation: Operation) -> None:
        meter = self._meter
        assert meter is not None, "steps are measured after start"
        # Again for each action: one of an asynchronous schedule uses other weights than the action before.
        meter.leave_out([*self._own_tensors(), *_batch_of(operation)])
        measured = {"F": meter.forward, "I": meter.backward_for_inputs}.get(action.op, contextlib.nullcontext)
        with measured():
            run(action, operation)

    def before_update(self, version_bytes: int = 0) -> None:
        """Measure gradients and older weights, before an update. version_bytes: of older weights that are kept now."""
        if self._meter is not None:
            self._gradient_bytes = self._training.bytes()[1]
            self._version_bytes = max(self._version_bytes, version_bytes)

    def _own_tensors(self) -> Iterator[Tensor]:
        for module in self._modules:
            for tensor in (*parameters_of(module).values(), *buffers_of(module).values()):
                if tensor is not None:
                    yield tensor


def _batch_of(operation: Operation) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves((operation.inputs, operation.targets)) if isinstance(leaf, Tensor)]
