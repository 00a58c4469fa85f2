"""Buffers that forwards write to in place, such as running averages that a layer also computes with.

In one process a micro-batch's backward comes right after its forward. In a pipeline other forwards come between: what
they write must not change what the first one has saved. So each gets tensors of its own to write to:

    forward 0   writes to scale, saves it     forward 1   gets a copy of scale, writes to that, saves it     backward 0

A backward may write to `module.scale`, which is the newest one, but not to the tensor that its forward had.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import TypeGuard

import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.compute.buffers import BufferSnapshot, Place, buffer_at, with_buffers
from lp_pipe.pipeline.compute.late_writes import LateWrites
from lp_pipe.pipeline.layers.wrapper import unwrapped
from lp_pipe.private_torch import buffers_of, put_buffer, version_of

_NO_PLACE: frozenset[Place] = frozenset()
_NOTHING_TO_WATCH = nullcontext()  # nearly always: made once, because each action asks for it


class WrittenBuffers:
    """Of a stage's layers; without BatchNorms', which no backward needs in train mode."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int = 0,
        shared: Mapping[str, str] = MappingProxyType({}),
        *,
        is_asynchronous: bool = False,
    ) -> None:
        """shared: names of those that must stay as they are, with what to say if they do not.

        is_asynchronous: backwards come late by design.
        """
        modules = [module for layer in layers for module in layer.modules()]
        self._modules = with_buffers(layers)
        self._late = LateWrites([] if is_asynchronous else modules)
        self._written: frozenset[Place] | None = None  # nobody knows before the first forward
        layers_by_name = {str(index): layer for index, layer in enumerate(layers, start=first_layer)}
        self._constants: dict[Place, str] = {}
        self._replaced: list[tuple[weakref.ref[Tensor], int, str]] = []  # with their versions and names
        for name, why in shared.items():
            index, path = name.split(".", 1)
            if index in layers_by_name:
                inner, _, attribute = path.rpartition(".")
                self._constants[unwrapped(layers_by_name[index]).get_submodule(inner), attribute] = why

    def watched(self) -> AbstractContextManager[None]:
        """A forward of training runs in the body.

        Raises:
            PipelineError: it has written to a shared one.
        """
        return self._watch() if self._modules else _NOTHING_TO_WATCH

    @contextmanager
    def _watch(self) -> Iterator[None]:
        # The first time with copies, which show writes to .data, too.
        before = BufferSnapshot(self._modules, None if self._written is None else _NO_PLACE)
        yield
        written = before.written()
        for place in self._constants.keys() & written:
            raise PipelineError(self._constants[place])
        self._written = (self._written or _NO_PLACE) | written

    def renew(self, *, are_saved: bool = True) -> None:
        """Let the next forward write to other tensors than those that earlier ones may have saved.

        are_saved: False: no backward is to come. What was replaced may be a module's buffer again (a step has failed).
        """
        if not are_saved:
            self._replaced.clear()
            self._late.forget()
            return
        if not self._written:
            return
        copies: dict[int, Tensor] = {}  # a buffer with two names stays one
        whole = self._apart()
        for module, name in self._written:
            buffer = buffer_at((module, name))
            if _has_memory(buffer) and buffer.untyped_storage().data_ptr() in whole:
                put_buffer(module, name, copies.setdefault(id(buffer), buffer.clone()))
                self._replaced.append((weakref.ref(buffer), version_of(buffer), f"{type(module).__name__}.{name}"))

    def after_forward(self) -> None:
        """One of training has run, and its backward is to come."""
        self._late.after_forward()

    def after_backward(self) -> None:
        """One backward has run, or the first part of one that is split.

        Raises:
            PipelineError: it has written to a buffer that another one has replaced, or that later forwards have used.
        """
        self._check_replaced()
        self._late.after_backward(self._written or _NO_PLACE)

    def after_weights(self) -> None:
        """As `after_backward`, for the second part of one that is split."""
        self._check_replaced()
        self._late.after_weights(self._written or _NO_PLACE)

    def _check_replaced(self) -> None:
        if not self._replaced:
            return
        self._replaced = [replaced for replaced in self._replaced if replaced[0]() is not None]
        for reference, version, name in self._replaced:
            buffer = reference()
            if buffer is not None and version_of(buffer) != version:
                self._replaced.clear()
                raise PipelineError(
                    f"a backward writes to buffer {name} by the tensor that its forward had, but later micro-batches' "
                    "forwards have gone on with another one: let it write to the module's attribute"
                )

    def _apart(self) -> set[int]:
        """The memory of buffers of which no other one is a view."""
        buffers = {id(b): b for module in self._modules for b in buffers_of(module).values() if _has_memory(b)}
        found = Counter(buffer.untyped_storage().data_ptr() for buffer in buffers.values())
        return {address for address, count in found.items() if count == 1}


def _has_memory(buffer: Tensor | None) -> TypeGuard[Tensor]:
    """Of its own, in one piece: a sparse one has not."""
    return buffer is not None and buffer.layout is torch.strided
