"""The factor that keeps small gradients of float16 from vanishing, with the numbers of torch.amp.GradScaler.

A pipeline has one scale: the conductor keeps it, the last stage multiplies the losses by it, and every stage divides
    its gradients by it. A gradient that is infinite or NaN on any stage makes all stages skip the step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lp_pipe.private_torch import unscale_in_place
from lp_pipe.training.gradients import dense

_GROWTH = 2.0
_BACKOFF = 0.5
_INTERVAL = 2000


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step.

    factor: what its losses are multiplied by.
    good_steps: finished steps since the factor last changed.
    """

    factor: float = 65536.0
    good_steps: int = 0

    def after(self, *, overflowed: bool) -> "LossScale":
        """Return the scale after a step that was finished, or skipped because gradients overflowed."""
        if overflowed:
            return LossScale(self.factor * _BACKOFF)
        if self.good_steps + 1 < _INTERVAL:
            return replace(self, good_steps=self.good_steps + 1)
        larger = _float32(self.factor * _GROWTH)
        return LossScale(larger if math.isfinite(larger) else self.factor)


def scaled(loss: Tensor, factor: float) -> Tensor:
    """Return the loss for the backward, in float32 at least."""
    return loss * torch.tensor(factor, dtype=torch.float32, device=loss.device)


def unscale(gradients: Sequence[Tensor], factor: float) -> bool:
    """Divide the gradients in place; return whether one of them is infinite or NaN."""
    overflowed = False
    # As in GradScaler: the reciprocal is taken in double precision, and there is one call for each kind of tensor.
    inverse = torch.tensor(factor, dtype=torch.float32, device="cpu").double().reciprocal().float()
    values = [dense(gradient) for gradient in gradients]
    for kind in {(value.device, value.dtype) for value in values}:
        same = [value for value in values if (value.device, value.dtype) == kind]
        found = torch.zeros((), dtype=torch.float32, device=kind[0])
        unscale_in_place(same, found, inverse.to(kind[0]))
        overflowed = overflowed or bool(found.item())
    return overflowed


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))
