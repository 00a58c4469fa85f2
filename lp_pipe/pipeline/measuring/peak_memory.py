"""Counts the memory of the tensors that some code makes, as long as each of them lives."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lp_pipe.pipeline.layers.message import tensors_of
from lp_pipe.private_torch import DispatchMode, address_of_storage


class PeakMeter(DispatchMode):  # type: ignore[misc]
    """peak_bytes: the most at a time of what was made in the body, which may be entered again.

    Tensors that share memory count once; those from before not at all. What a kernel needs only while it runs is not
    seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak_bytes = 0
        self._alive: dict[int, Any] = {}  # weak references by the storage's address, of what has been seen

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch in the place of each operation."""
        for tensor in _tensors((*args, *(kwargs or {}).values())):
            self._see(tensor.untyped_storage(), 0)  # from before, if it was not seen yet
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            self._see(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return made

    def _see(self, storage: UntypedStorage, size: int) -> None:
        address = address_of_storage(storage)
        if address in self._alive:
            return
        self._alive[address] = weakref.ref(storage, lambda _: self._forget(address, size))
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _forget(self, address: int, size: int) -> None:
        self._alive.pop(address, None)
        self.bytes -= size


def _tensors(value: Any) -> list[Tensor]:
    """Those that have one storage, which sparse ones do not."""
    return [tensor for tensor in tensors_of(value) if tensor.layout is torch.strided]
