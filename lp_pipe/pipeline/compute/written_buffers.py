"""Buffers and parameters to which forwards and backwards write, such as running averages that a layer computes with.

In one process a micro-batch's backward comes right after its forward. In a pipeline other forwards come between, and
what they write must not change what the first one has saved. So each forward gets its own tensors to write to:

    forward 0   writes to scale, saves it     forward 1   gets a copy of scale, writes to that, saves it     backward 0

A backward may write to `module.scale`, which is the newest tensor, but not to the tensor that its forward had.

What a backward writes for later forwards comes too late here. A layer that torch.utils.checkpoint runs again in the
backward counts its statistics once more, and computes with them:

    one process   forward 0   again 0   forward 1   again 1
    a pipeline    forward 0   forward 1   again 0   again 1      forward 1 has not seen what again 0 writes

A hook that updates its parameter (an optimizer in the backward) does so too late for the forwards that have run.
"""

import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import TypeGuard

import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.wrapper import unwrapped
from lp_pipe.private_torch import buffers_of, is_batch_norm, put_buffer, version_of, versions_of
from lp_pipe.training.buffer_snapshot import BufferPlace, BufferSnapshot, buffer_at, with_buffers

_NO_PLACE: frozenset[BufferPlace] = frozenset()
_NOTHING_TO_WATCH = nullcontext()  # the usual case: made once, because each action uses it


class WrittenBuffers:
    """The buffers of a stage's layers that forwards write to, without those of BatchNorms.

    A BatchNorm's backward needs no buffer in train mode.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int = 0,
        shared: Mapping[str, str] = MappingProxyType({}),
        *,
        is_asynchronous: bool = False,
    ) -> None:
        """shared: names of buffers that must not change, each with the error to raise if one does.

        is_asynchronous: backwards come late by design, so late writes are not refused.
        """
        modules = [module for layer in layers for module in layer.modules()]
        self._modules = with_buffers(layers)
        self.backward_check = BackwardWriteCheck([] if is_asynchronous else modules)
        self._written: frozenset[BufferPlace] | None = None  # None: unknown before the first forward
        layers_by_name = {str(index): layer for index, layer in enumerate(layers, start=first_layer)}
        self._constants: dict[BufferPlace, str] = {}
        self._replaced: list[tuple[weakref.ref[Tensor], int, str]] = []  # (buffer, version, name)
        for name, why in shared.items():
            index, path = name.split(".", 1)
            if index in layers_by_name:
                inner, _, attribute = path.rpartition(".")
                self._constants[unwrapped(layers_by_name[index]).get_submodule(inner), attribute] = why

    def watched(self) -> AbstractContextManager[None]:
        """Return the context in which a forward of training runs.

        Raises:
            PipelineError: the forward has written to a shared buffer.
        """
        return self._watch() if self._modules else _NOTHING_TO_WATCH

    @contextmanager
    def _watch(self) -> Iterator[None]:
        # Copies show writes to .data, too; only the first forward pays for them.
        before = BufferSnapshot(self._modules, None if self._written is None else _NO_PLACE)
        yield
        written = before.written()
        for place in self._constants.keys() & written:
            raise PipelineError(self._constants[place])
        self._written = (self._written or _NO_PLACE) | written

    def renew(self, *, are_saved: bool = True) -> None:
        """Let the next forward write to other tensors than those that earlier forwards may have saved.

        are_saved: whether a backward is to come. If not (a step has failed), a replaced tensor may be a module's buffer
            again.
        """
        if not are_saved:
            self._replaced.clear()
            self.backward_check.forget()
            return
        if not self._written:
            return
        copies: dict[int, Tensor] = {}  # a buffer with two names stays one tensor
        whole = self._apart()
        for module, name in self._written:
            buffer = buffer_at((module, name))
            if _has_memory(buffer) and buffer.untyped_storage().data_ptr() in whole:
                put_buffer(module, name, copies.setdefault(id(buffer), buffer.clone()))
                self._replaced.append((weakref.ref(buffer), version_of(buffer), f"{type(module).__name__}.{name}"))

    def after_backward(self) -> None:
        """Note that a backward has run, or the first part of a split one.

        Raises:
            PipelineError: it has written to a buffer that was replaced, or that later forwards have used.
        """
        self._check_replaced()
        self.backward_check.after_backward(self._written or _NO_PLACE)

    def after_weights(self) -> None:
        """Note that the second part of a split backward has run; raises as `after_backward`."""
        self._check_replaced()
        self.backward_check.after_weights(self._written or _NO_PLACE)

    def _check_replaced(self) -> None:
        if not self._replaced:
            return
        self._replaced = [replaced for replaced in self._replaced if replaced[0]() is not None]
        for reference, version, name in self._replaced:
            buffer = reference()
            if buffer is not None and version_of(buffer) != version:
                self._replaced.clear()
                raise PipelineError(
                    f"a backward writes to buffer {name} through the tensor that its forward had, but forwards of "
                    "later micro-batches continue with another tensor: let it write to the module's attribute"
                )

    def _apart(self) -> set[int]:
        """Return the addresses of memory that a single buffer uses."""
        buffers = {id(b): b for module in self._modules for b in buffers_of(module).values() if _has_memory(b)}
        found = Counter(buffer.untyped_storage().data_ptr() for buffer in buffers.values())
        return {address for address, count in found.items() if count == 1}


def _has_memory(buffer: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether a buffer has memory in one piece, unlike a sparse one."""
    return buffer is not None and buffer.layout is torch.strided


_State = dict[BufferPlace, tuple[Tensor | None, int]]  # each buffer and its version


class BackwardWriteCheck:
    """A check, after each backward of a stage, that it has not written what later forwards have used already."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = [module for module in modules if buffers_of(module)]
        self._parameters = {
            parameter: f"parameter {name!r} of {type(module).__name__}"
            for module in modules
            for name, parameter in module.named_parameters(recurse=False)
        }
        self._before: _State = {}
        self._versions: list[int] = []
        self._outstanding = {"backward": 0, "weights": 0}  # the number of forwards that wait for this part

    def forget(self) -> None:
        """Note that no forward waits for its backward."""
        self._outstanding = dict.fromkeys(self._outstanding, 0)

    def after_forward(self) -> None:
        """Note that a forward has run, and the present state of the buffers."""
        for part in self._outstanding:
            self._outstanding[part] += 1
        self._before = _state_of(self.modules)
        self._versions = self._versions_now()

    def after_backward(self, counted: Collection[BufferPlace]) -> None:
        """Check what a backward has written.

        counted: places that forwards write to, beside the statistics of BatchNorms.

        Raises:
            PipelineError: later forwards have already used what it has written to.
        """
        self._check("backward", counted)

    def after_weights(self, counted: Collection[BufferPlace]) -> None:
        """Check the second part of a split backward, as `after_backward`."""
        self._check("weights", counted)

    def _check(self, part: str, counted: Collection[BufferPlace]) -> None:
        are_later_forwards_done = self._outstanding[part] > 1
        self._outstanding[part] -= 1
        self._check_parameters(are_later_forwards_done)
        if not self.modules:
            return
        now = _state_of(self.modules)
        written = [place for place, state in now.items() if not _same(state, self._before.get(place))]
        self._before = now
        for module, name in written if are_later_forwards_done else ():
            if is_batch_norm(module) or ((module, name) in counted and _is_no_counter(buffers_of(module)[name])):
                what = "statistics" if is_batch_norm(module) else f"buffer {name!r}"
                raise PipelineError(
                    f"a backward changes {what} of {type(module).__name__}, as forwards do, but after the forwards of "
                    "later micro-batches, unlike in one process: if torch.utils.checkpoint runs a layer again, remove "
                    "it and choose the layer with add_pipeline(recompute=...), which counts each micro-batch once"
                )

    def _check_parameters(self, are_later_forwards_done: bool) -> None:
        before, self._versions = self._versions, self._versions_now()
        if before == self._versions or not are_later_forwards_done:
            return
        changes = zip(self._parameters.values(), before, self._versions, strict=True)
        name = next(name for name, version, now in changes if version != now)
        raise PipelineError(
            f"a backward changes {name} after the forwards of later micro-batches, which in one process would have "
            "had the new weights: if a hook updates the parameter (an optimizer in the backward), leave that to the "
            "model's optimizer, or train with microbatches=1"
        )

    def _versions_now(self) -> list[int]:
        return versions_of(self._parameters)


def _state_of(modules: Sequence[nn.Module]) -> _State:
    # Kernels of batch norm do not count their writes as versions, but they also write to num_batches_tracked.
    return {
        (module, name): (buffer, version_of(buffer) if buffer is not None else 0)
        for module in modules
        for name, buffer in buffers_of(module).items()
    }


def _same(now: tuple[Tensor | None, int], before: tuple[Tensor | None, int] | None) -> bool:
    return before is not None and now[0] is before[0] and now[1] == before[1]


def _is_no_counter(buffer: Tensor | None) -> bool:
    """Return whether a buffer holds floating-point numbers: counts add up in any order."""
    return buffer is not None and (buffer.is_floating_point() or buffer.is_complex())
