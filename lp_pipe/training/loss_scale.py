"""The factor that keeps small gradients of float16 from vanishing, with the numbers of torch.amp.GradScaler.

The pipeline has one: its conductor keeps it, the last stage multiplies the losses by it, and every stage divides its
gradients. A gradient that is infinite or NaN on any stage skips the step on all.
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
    """factor: of the next step's losses. good_steps: since it has last changed."""

    factor: float = 65536.0
    good_steps: int = 0

    def after(self, *, overflowed: bool) -> "LossScale":
        """That of the step behind one that was done or skipped."""
        if overflowed:
            return LossScale(self.factor * _BACKOFF)
        if self.good_steps + 1 < _INTERVAL:
            return replace(self, good_steps=self.good_steps + 1)
        larger = _float32(self.factor * _GROWTH)
        return LossScale(larger if math.isfinite(larger) else self.factor)


def scaled(loss: Tensor, factor: float) -> Tensor:
    """A loss for the backward; in float32 at least, whatever it was."""
    return loss * torch.tensor(factor, dtype=torch.float32, device=loss.device)


def unscale(gradients: Sequence[Tensor], factor: float) -> bool:
    """Divide in place; whether one of them is infinite or NaN."""
    overflowed = False
    # As GradScaler: the reciprocal in double precision, one call for each kind of tensors.
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
