"""Refuse backwards that write what forwards of later micro-batches have used already.

In one process a micro-batch's backward comes right after its forward. What a backward writes for later forwards comes
too late in a pipeline. A layer that torch.utils.checkpoint runs again in the backward counts its statistics once more,
and computes with them:

    one process   forward 0   again 0   forward 1   again 1
    a pipeline    forward 0   forward 1   again 0   again 1      forward 1 has not seen what again 0 writes

A hook that updates its parameter (an optimizer in the backward) does so too late for the forwards that have run. And a
backward may write to `module.scale`, which is the newest tensor, but not to the tensor that its forward had.
"""

import weakref

from torch import Tensor

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.schedule import Action
from lp_pipe.pipeline.worker.execution import Operation, RunAction
from lp_pipe.private_torch import buffers_of, is_batch_norm, version_of, versions_of
from lp_pipe.training.buffer_snapshot import BufferPlace, buffer_at


class LateWrites:
    """A check, after each backward of a stage, of what it has written.

    is_asynchronous: backwards come late by design; only writes to tensors of earlier forwards are refused.
    """

    def __init__(self, stage: Stage, *, is_asynchronous: bool = False) -> None:
        self._stage = stage
        modules = [] if is_asynchronous else list(dict.fromkeys(stage.modules()))
        self._modules = [module for module in modules if buffers_of(module)]
        self._parameters = {
            parameter: f"parameter {name!r} of {type(module).__name__}"
            for module in modules
            for name, parameter in module.named_parameters(recurse=False)
        }
        self._before: dict[BufferPlace, tuple[Tensor | None, int]] = {}  # each buffer and its version
        self._versions: list[int] = []
        self._outstanding: dict[str, int] = {}  # by "F" and "W", the forwards that wait for this part of their backward
        self._replaced: list[tuple[weakref.ref[Tensor], int, str]] = []  # (buffer, version, name)

    def around(self, run: RunAction, action: Action, operation: Operation) -> None:
        """Run an action of the stage, and check what it has written.

        Raises:
            PipelineError: a backward has written to a buffer that was replaced, or that later forwards have used.
        """
        if action.op != "F":
            run(action, operation)
            self._check_replaced()
            self._check("W" if action.op == "W" else "F")
            if self._stage.is_idle:
                self._before = {}  # holds tensors
            return
        if self._stage.is_idle:
            self._outstanding = {"F": 0, "W": 0}
            self._replaced.clear()
        before = {place: buffer_at(place) for place in self._stage.writes.written_buffers or ()}
        run(action, operation)
        for (module, name), buffer in before.items():
            if buffer is not None and buffer_at((module, name)) is not buffer:
                self._replaced.append((weakref.ref(buffer), version_of(buffer), f"{type(module).__name__}.{name}"))
        for part in self._outstanding:
            self._outstanding[part] += 1
        self._before, self._versions = self._state_of_buffers(), versions_of(self._parameters)

    def _check_replaced(self) -> None:
        self._replaced = [replaced for replaced in self._replaced if replaced[0]() is not None]
        for reference, version, name in self._replaced:
            buffer = reference()
            if buffer is not None and version_of(buffer) != version:
                raise PipelineError(
                    f"a backward writes to buffer {name} through the tensor that its forward had, but forwards of "
                    "later micro-batches continue with another tensor: let it write to the module's attribute"
                )

    def _check(self, part: str) -> None:
        are_later_forwards_done = self._outstanding[part] > 1
        self._outstanding[part] -= 1
        before, self._versions = self._versions, versions_of(self._parameters)
        buffers_before, self._before = self._before, self._state_of_buffers()
        if not are_later_forwards_done:
            return
        changes = zip(self._parameters.values(), before, self._versions, strict=True)
        for name in (name for name, version, now in changes if version != now):
            raise PipelineError(
                f"a backward changes {name} after the forwards of later micro-batches, which in one process would have "
                "had the new weights: if a hook updates the parameter (an optimizer in the backward), leave that to "
                "the model's optimizer, or train with microbatches=1"
            )
        counted = self._stage.writes.written_buffers or ()
        for place, (buffer, version) in self._before.items():
            was, version_before = buffers_before.get(place, (None, -1))
            if buffer is was and version == version_before:
                continue
            module, name = place
            if is_batch_norm(module) or (place in counted and _is_no_counter(buffer)):
                what = "statistics" if is_batch_norm(module) else f"buffer {name!r}"
                raise PipelineError(
                    f"a backward changes {what} of {type(module).__name__}, as forwards do, but after the forwards of "
                    "later micro-batches, unlike in one process: if torch.utils.checkpoint runs a layer again, remove "
                    "it and choose the layer with add_pipeline(recompute=...), which counts each micro-batch once"
                )

    def _state_of_buffers(self) -> dict[BufferPlace, tuple[Tensor | None, int]]:
        # Kernels of batch norm do not count their writes as versions, but they also write to num_batches_tracked.
        return {
            (module, name): (buffer, version_of(buffer) if buffer is not None else 0)
            for module in self._modules
            for name, buffer in buffers_of(module).items()
        }


def _is_no_counter(buffer: Tensor | None) -> bool:
    """Return whether a buffer holds floating-point numbers: counts add up in any order."""
    return buffer is not None and (buffer.is_floating_point() or buffer.is_complex())
