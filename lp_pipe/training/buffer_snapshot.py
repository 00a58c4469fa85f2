"""The buffers of modules (BatchNorm's statistics), as they were before something ran."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lp_pipe.private_torch import buffers_of, is_batch_norm, put_buffer, version_of

BufferPlace = tuple[nn.Module, str]


@dataclass(frozen=True)
class _Before:
    buffer: Tensor | None  # None: one that a forward will make
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
        """What it held; None also where only a copy could tell."""
        if self.copy is not None:
            return self.copy
        return None if self.was_written_in_place else self.buffer

    @property
    def is_lost(self) -> bool:
        """Whether only a copy could tell what it held."""
        return self.copy is None and self.was_written_in_place


class BufferSnapshot:
    """All buffers of some modules. copied: the only places, beside BatchNorms, of which a copy is made; None: all."""

    def __init__(self, modules: Iterable[nn.Module], copied: frozenset[BufferPlace] | None = None) -> None:
        self._before: dict[BufferPlace, _Before] = {}
        for module in modules:
            for name, buffer in buffers_of(module).items():
                if buffer is None:
                    self._before[module, name] = _Before(None, 0, None)
                    continue
                is_copied = copied is None or (module, name) in copied or is_batch_norm(module)
                # Sparse ones (a graph's adjacency) cannot be compared, nor written to without a new version.
                copy = buffer.detach().clone() if is_copied and buffer.layout is torch.strided else None
                self._before[module, name] = _Before(buffer, version_of(buffer), copy)

    def written(self) -> frozenset[BufferPlace]:
        """Where something has changed since, in place or by another tensor."""
        return frozenset(
            place
            for place, before in self._before.items()
            if buffer_at(place) is not before.buffer or before.was_written_in_place
        )

    def without_copy(self) -> list[str]:
        """The names of those whose value is lost."""
        return [name for (_, name), before in self._before.items() if before.is_lost]

    def restore(self) -> None:
        """Put the values back, in the same tensors; nobody who has saved one for a backward notices."""
        for (module, name), before in self._before.items():
            if before.buffer is not None and before.copy is not None and before.was_written_in_place:
                _put_back(before.buffer, before.copy)
            put_buffer(module, name, before.buffer)

    def only(self, places: frozenset[BufferPlace]) -> "BufferSnapshot":
        """This, without what has not changed and needs no memory therefore."""
        smaller = BufferSnapshot(())
        smaller._before = {place: before for place, before in self._before.items() if place in places}
        return smaller

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """In the body the modules have the old values, in other tensors; afterwards theirs again, untouched."""
        present = {place: buffer_at(place) for place in self._before}
        for (module, name), before in self._before.items():
            put_buffer(module, name, before.value)
        try:
            yield
        finally:
            for (module, name), buffer in present.items():
                put_buffer(module, name, buffer)


def with_buffers(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules in some layers that have any, without BatchNorms, whose own no backward needs in train mode."""
    modules = (module for layer in layers for module in layer.modules())
    return [module for module in modules if buffers_of(module) and not is_batch_norm(module)]


def set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Copy the value into a module's buffer, where it fits."""
    present = buffers_of(module)[name]
    if present is not None and (present.shape, present.dtype) == (value.shape, value.dtype):
        present.copy_(value)
    else:  # a mask that is made anew for longer sequences
        put_buffer(module, name, value)


def _put_back(buffer: Tensor, value: Tensor) -> None:
    if buffer.shape == value.shape:
        buffer.data.copy_(value)
    else:  # resized by the forward, as observers of quantisation do to begin with
        buffer.data = value.clone()


def buffer_at(place: BufferPlace) -> Tensor | None:
    """None where there is none (any more)."""
    module, name = place
    buffers = buffers_of(module)
    return buffers[name] if name in buffers else None  # noqa: SIM401, TorchScript's has no get()
