"""The loss where it is computed: on the last stage's worker, a copy of the user's, with buffers that it may write to.

Such as a running average of the outputs (DINO's center). They are kept as a layer's are: evaluation and failed steps
leave them as they were, replicas agree on them, checkpoints have them. What a loss keeps elsewhere, nobody knows of.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lp_pipe.pipeline.compute.buffers import BufferSnapshot, Place, set_buffer
from lp_pipe.pipeline.compute.device import own_loss
from lp_pipe.pipeline.layers.model import Loss
from lp_pipe.private_torch import buffers_of, non_persistent_buffers


class OwnLoss:
    """None on workers without the last stage. modules: the loss and what is in it, if it is a module."""

    def __init__(self, loss: Loss | None, device: torch.device) -> None:
        self.call = own_loss(loss, device) if loss is not None else None
        self.modules = list(self.call.modules()) if isinstance(self.call, nn.Module) else []
        self._device = device
        self._first = BufferSnapshot(self.modules)

    def state(self) -> dict[str, Tensor]:
        """The buffers that it has written to; the others are as the program gives them, also after a restart."""
        written = self._first.written()
        found = {
            name: buffers_of(module)[own] for name, (module, own) in self._places().items() if (module, own) in written
        }
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Those that a checkpoint has, and all others as they were at the start."""
        self._first.restore()
        for name, (module, own) in self._places().items():
            if name in state:
                set_buffer(module, own, state[name].to(self._device))

    def _places(self) -> dict[str, Place]:
        """By their names in the loss's state_dict."""
        return {
            f"{prefix}.{name}".removeprefix("."): (module, name)
            for prefix, module in (self.call.named_modules() if isinstance(self.call, nn.Module) else ())
            for name in buffers_of(module).keys() - non_persistent_buffers(module)
        }
