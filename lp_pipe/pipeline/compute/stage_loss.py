"""The loss function where it is computed: a copy of the user's, on the last stage's worker.

Its buffers (a running average of the outputs, DINO's center) are treated as a layer's: evaluations and failed steps
leave them as they were, replicas agree on them, and checkpoints contain them. State that a loss keeps anywhere else
is not saved.
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lp_pipe.pipeline.layers.model import Loss
from lp_pipe.private_torch import buffers_of, non_persistent_buffers
from lp_pipe.training.buffer_snapshot import BufferPlace, BufferSnapshot, set_buffer


def copy_loss(loss: Loss, device: torch.device) -> Loss:
    """Return a copy of the loss with its buffers (weights of classes) on the device.

    A loss that is no module is returned itself.
    """
    return copy.deepcopy(loss).to(device) if isinstance(loss, nn.Module) else loss


class StageLoss:
    """The loss on a worker; `call` is None on workers without the last stage.

    modules: the loss and its submodules, if it is a module.
    """

    def __init__(self, loss: Loss | None, device: torch.device) -> None:
        self.call = copy_loss(loss, device) if loss is not None else None
        self.modules = list(self.call.modules()) if isinstance(self.call, nn.Module) else []
        self._device = device
        self._first = BufferSnapshot(self.modules)

    def state(self) -> dict[str, Tensor]:
        """Return the buffers that the loss has written to; the program gives the others, also after a restart."""
        written = self._first.written()
        found = {
            name: buffers_of(module)[own] for name, (module, own) in self._places().items() if (module, own) in written
        }
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set the buffers that a checkpoint has; all others get their first values."""
        self._first.restore()
        for name, (module, own) in self._places().items():
            if name in state:
                set_buffer(module, own, state[name].to(self._device))

    def _places(self) -> dict[str, BufferPlace]:
        """Return the place of each persistent buffer, by its name in the loss's state_dict."""
        return {
            f"{prefix}.{name}".removeprefix("."): (module, name)
            for prefix, module in (self.call.named_modules() if isinstance(self.call, nn.Module) else ())
            for name in buffers_of(module).keys() - non_persistent_buffers(module)
        }
