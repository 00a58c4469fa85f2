"""The memory that a stage keeps, of which its outputs may be a part: whoever writes to such a one changes both."""

from collections.abc import Collection, Sequence

from torch import nn

from lp_pipe.pipeline.compute.buffers import with_buffers
from lp_pipe.pipeline.layers.overlaps import Unwritten, address_of
from lp_pipe.private_torch import buffers_of


class Kept:
    """Parameters and buffers of some layers, and what others keep that the last forward has received."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._parameters = [parameter for layer in layers for parameter in layer.parameters()]
        self._with_buffers = with_buffers(layers)
        self.elsewhere: Sequence[Unwritten] = ()

    def addresses(self) -> Collection[int]:
        """As they are now: forwards may have given others in the place of buffers."""
        found = {parameter.data_ptr() for parameter in self._parameters}  # all of their memory, but for views
        for module in self._with_buffers:
            found |= {address_of(buffer) for buffer in buffers_of(module).values() if buffer is not None}
        for received in self.elsewhere:
            found |= received.addresses
        found.discard(0)  # of those without any
        return found
