"""A snapshot of the buffers of modules, such as BatchNorm's statistics, to compare with and to restore."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lp_pipe.private_torch import buffers_of, is_batch_norm, put_buffer, version_of

BufferPlace = tuple[nn.Module, str]


class _Before(NamedTuple):
    buffer: Tensor | None  # None: a forward will create the buffer
    version: int
    copy: Tensor | None

    @property
    def was_written_in_place(self) -> bool:
        if self.buffer is None:
            return False
        if version_of(self.buffer) != self.version:
            return True
        # Kernels of batch norm write to the running statistics without counting that as a version.
        return self.copy is not None and not torch.equal(self.copy, self.buffer)

    @property
    def value(self) -> Tensor | None:
        """The old value; None also if only a copy could tell."""
        if self.copy is not None:
            return self.copy
        return None if self.was_written_in_place else self.buffer

    @property
    def is_lost(self) -> bool:
        """Whether the old value is gone: it was overwritten, and there is no copy."""
        return self.copy is None and self.was_written_in_place


class BufferSnapshot:
    """All buffers of some modules, as they were when this was made.

    copied: the only places of which a copy is made, beside BatchNorms; None: all places.
    """

    def __init__(self, modules: Iterable[nn.Module], copied: frozenset[BufferPlace] | None = None) -> None:
        self._before: dict[BufferPlace, _Before] = {}
        for module in modules:
            for name, buffer in buffers_of(module).items():
                if buffer is None:
                    self._before[module, name] = _Before(None, 0, None)
                    continue
                is_copied = copied is None or (module, name) in copied or is_batch_norm(module)
                # Sparse buffers (a graph's adjacency) cannot be compared, and a write to them always counts as a new
                # version.
                copy = buffer.detach().clone() if is_copied and buffer.layout is torch.strided else None
                self._before[module, name] = _Before(buffer, version_of(buffer), copy)

    def written(self) -> frozenset[BufferPlace]:
        """Return the places where the buffer was written to in place or replaced since."""
        return frozenset(
            place
            for place, before in self._before.items()
            if buffer_at(place) is not before.buffer or before.was_written_in_place
        )

    def without_copy(self) -> list[str]:
        """Return the names of the buffers with a lost old value."""
        return [name for (_, name), before in self._before.items() if before.is_lost]

    def restore(self) -> None:
        """Put the values back into the same tensors, without a new version.

        So a tensor that autograd has saved stays valid.
        """
        for (module, name), before in self._before.items():
            if before.buffer is not None and before.copy is not None and before.was_written_in_place:
                _put_back(before.buffer, before.copy)
            put_buffer(module, name, before.buffer)

    def only(self, places: frozenset[BufferPlace]) -> "BufferSnapshot":
        """Return a snapshot of these places alone, which holds less memory."""
        smaller = BufferSnapshot(())
        smaller._before = {place: before for place, before in self._before.items() if place in places}
        return smaller

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the modules the old values, in other tensors, in the body."""
        present = {place: buffer_at(place) for place in self._before}
        for (module, name), before in self._before.items():
            put_buffer(module, name, before.value)
        try:
            yield
        finally:
            for (module, name), buffer in present.items():
                put_buffer(module, name, buffer)


def with_buffers(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules in some layers that have buffers, without BatchNorms.

    A BatchNorm's backward needs no buffer in train mode.
    """
    modules = (module for layer in layers for module in layer.modules())
    return [module for module in modules if buffers_of(module) and not is_batch_norm(module)]


def set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Copy the value into a module's buffer if it fits; otherwise replace the buffer."""
    present = buffers_of(module)[name]
    if present is not None and (present.shape, present.dtype) == (value.shape, value.dtype):
        present.copy_(value)
    else:  # a mask that is made again for longer sequences
        put_buffer(module, name, value)


def _put_back(buffer: Tensor, value: Tensor) -> None:
    if buffer.shape == value.shape:
        buffer.data.copy_(value)
    else:  # resized by the forward, as quantisation observers are at first
        buffer.data = value.clone()


def buffer_at(place: BufferPlace) -> Tensor | None:
    """Return the buffer at a place; None if there is none (any more)."""
    module, name = place
    buffers = buffers_of(module)
    return buffers[name] if name in buffers else None  # noqa: SIM401, TorchScript's has no get()
