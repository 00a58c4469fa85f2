"""The memory of layers: what their forwards leave for their backwards, and the peak of what they make.

The stashes are counted so that consecutive layers' bytes add up:

    Linear -> Tanh -> Linear     Tanh keeps its output, and the second Linear the same tensor: it counts once, as Tanh's
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from lp_pipe.pipeline.compute.activation_meter import ActivationMeter, memory_of
from lp_pipe.pipeline.compute.stage import LayerCall
from lp_pipe.pipeline.layers.message import tensors_of
from lp_pipe.pipeline.layers.skips import call
from lp_pipe.private_torch import DispatchMode, address_of_storage


class LayerStash:
    """The stash of one layer, while the graph of that forward lives.

    The layer's stage calls this in the layer's place (`Stage.watch`).
    batch: tensors that the layer may keep and that are in memory anyway.
    """

    def __init__(self, layer: nn.Module, batch: Any) -> None:
        self.meter = ActivationMeter()
        self.meter.leave_out([*layer.parameters(), *layer.buffers(), *tensors_of(batch)])
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []

    def __call__(self, place: LayerCall, layer: nn.Module, value: Any, skips: dict[str, Any]) -> Any:
        with self.meter.counting():
            made = call(layer, (value,), skips)
        self._inputs, self._outputs = tensors_of(value), tensors_of(made)
        return made

    def counted(self, wanted: Iterable[int]) -> tuple[int, set[int]]:
        """Return the bytes without its inputs', and which of those it keeps.

        wanted: the outputs that the next layer keeps.
        """
        kept = {place for place, tensor in enumerate(self._inputs) if self.meter.holds(tensor)}
        own = self.meter.bytes - _bytes(self._inputs[place] for place in kept)
        places = {_address(tensor): place for place, tensor in enumerate(self._inputs)}
        passed_on = [self._outputs[place] for place in wanted if not self.meter.holds(self._outputs[place])]
        made = [tensor for tensor in passed_on if _address(tensor) not in places]
        # Views of an input, and what was written in place, count for the layer that made the memory.
        return own + _bytes(made), kept | {places[at] for at in map(_address, passed_on) if at in places}


def stash_bytes(stashes: Sequence[LayerStash]) -> list[int]:
    """Return the bytes of all layers of a model, in order, without what the first keeps of the batch."""
    found: list[int] = []
    wanted: set[int] = set()
    for stash in reversed(stashes):
        own, wanted = stash.counted(wanted)
        found.append(own)
    return found[::-1]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors; memory that some of them share counts once."""
    return sum({_address(tensor): memory_of(tensor)[1] for tensor in tensors}.values())


def _address(tensor: Tensor) -> int:
    return memory_of(tensor)[0]


class PeakMeter(DispatchMode):  # type: ignore[misc]
    """A meter of the memory of tensors that are made in its body, as long as each of them lives.

    peak_bytes: the most at a time. The body may be entered again.
    Tensors that share memory count once, and those from before not at all. What a kernel needs only while it runs
    is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak_bytes = 0
        self._alive: dict[int, Any] = {}  # weak references to storages, by address

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count what it makes; torch calls this in the place of each operation."""
        for tensor in _tensors((*args, *(kwargs or {}).values())):
            self._see(tensor.untyped_storage(), 0)  # a storage from before the body counts nothing
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
    """Return the tensors that have one storage, which sparse ones do not."""
    return [tensor for tensor in tensors_of(value) if tensor.layout is torch.strided]
