"""What the forward of each layer leaves for its backward, counted so that consecutive layers' bytes add up.

Linear -> Tanh -> Linear     Tanh keeps its output, and the second Linear the same tensor: it counts once, as Tanh's
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from lp_pipe.pipeline.compute.activation_meter import ActivationMeter, memory_of
from lp_pipe.pipeline.compute.stage import Place
from lp_pipe.pipeline.layers.message import tensors_of
from lp_pipe.pipeline.layers.skips import call


class LayerStash:
    """Of one layer, whose stage calls this in its place (`Stage.watch`), while the graph of that forward lives.

    batch: what it may keep and is in memory anyway.
    """

    def __init__(self, layer: nn.Module, batch: Any) -> None:
        self.meter = ActivationMeter()
        self.meter.leave_out([*layer.parameters(), *layer.buffers(), *tensors_of(batch)])
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []

    def __call__(self, place: Place, layer: nn.Module, value: Any, skips: dict[str, Any]) -> Any:
        with self.meter.counting():
            made = call(layer, (value,), skips)
        self._inputs, self._outputs = tensors_of(value), tensors_of(made)
        return made

    def counted(self, wanted: Iterable[int]) -> tuple[int, set[int]]:
        """Bytes without its inputs', and which of those it keeps. wanted: the outputs that the next layer keeps."""
        kept = {place for place, tensor in enumerate(self._inputs) if self.meter.holds(tensor)}
        own = self.meter.bytes - _bytes(self._inputs[place] for place in kept)
        places = {_address(tensor): place for place, tensor in enumerate(self._inputs)}
        passed_on = [self._outputs[place] for place in wanted if not self.meter.holds(self._outputs[place])]
        made = [tensor for tensor in passed_on if _address(tensor) not in places]
        # Views of an input, and what was written in place: whoever made that holds it.
        return own + _bytes(made), kept | {places[at] for at in map(_address, passed_on) if at in places}


def stash_bytes(stashes: Sequence[LayerStash]) -> list[int]:
    """Of all layers of a model, in order; what the first one keeps of its input, the batch, does not count."""
    found: list[int] = []
    wanted: set[int] = set()
    for stash in reversed(stashes):
        own, wanted = stash.counted(wanted)
        found.append(own)
    return found[::-1]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Memory that some of them share counts once."""
    return sum({_address(tensor): memory_of(tensor)[1] for tensor in tensors}.values())


def _address(tensor: Tensor) -> int:
    return memory_of(tensor)[0]
