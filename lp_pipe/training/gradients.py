"""Gradients: their norms, the search for NaN and infinity, and the scale that keeps those of float16 from vanishing.

The scale has the numbers of torch.amp.GradScaler. A pipeline has one scale: the conductor keeps it, the last stage
multiplies the losses by it, and every stage divides its gradients by it. A gradient that is infinite or NaN on any
stage makes all stages skip the step.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lp_pipe.private_torch import grouped_by_dtype, norms_of_each, pytree, sparse_values, unscale_in_place


class GradientNorm(NamedTuple):
    """The 2-norm of one gradient, in the host's memory.

    dtype: the gradient's; the norm of a complex one is real.
    """

    norm: Tensor
    dtype: torch.dtype


def norms_of(gradients: Iterable[Tensor]) -> list[GradientNorm]:
    """Return the norm of each gradient, in the order given."""
    gradients = list(gradients)
    found = on_host(norms_of_each(gradients)) if gradients else ()
    return [GradientNorm(norm, gradient.dtype) for norm, gradient in zip(found, gradients, strict=True)]


def on_host(numbers: Sequence[Tensor]) -> list[Tensor]:
    """Return the 0-dimensional tensors in the host's memory; each device is waited for once per dtype."""
    copies: dict[int, Tensor] = {}
    kinds = {(number.device, number.dtype) for number in numbers if not number.is_cpu}
    for kind in kinds:
        places = [place for place, number in enumerate(numbers) if (number.device, number.dtype) == kind]
        together = torch.stack([numbers[place] for place in places]).cpu()
        copies |= {place: number.clone() for place, number in zip(places, together.unbind(), strict=True)}
    return [copies.get(place, number) for place, number in enumerate(numbers)]


def total_norm(norms: Sequence[GradientNorm], device: torch.device) -> Tensor | None:
    """Return the norm of all gradients from the norms of single ones, in the order of the parameters; None without any.

    It has the bits of torch.nn.utils.clip_grad_norm_ in one process: it is computed on `device`, and is then in the
    host's memory.
    """
    if not norms:
        return None
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in _as_torch_adds(norms, device)]))
    return total.cpu()


def _as_torch_adds(norms: Sequence[GradientNorm], device: torch.device) -> list[Tensor]:
    """Return the norms one dtype after the other, in torch's order of dtypes: the sum of squares depends on it."""
    if len({dtype for _, dtype in norms}) == 1:
        return [norm for norm, _ in norms]
    stand_ins = [torch.empty(0, dtype=dtype, device=device) for _, dtype in norms]
    return [norms[index].norm for positions in grouped_by_dtype(stand_ins) for index in positions]


def is_finite(value: Any) -> bool:
    """Return whether no tensor of a value holds NaN or infinity."""
    leaves = [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)
    return all(_is_finite(leaf.detach()) for leaf in leaves if isinstance(leaf, Tensor) and _may_be_infinite(leaf))


def dense(tensor: Tensor) -> Tensor:
    """Return all numbers of a tensor that may be sparse, as the gradient of an nn.Embedding(sparse=True) is."""
    return sparse_values(tensor) if tensor.is_sparse else tensor


def _is_finite(tensor: Tensor) -> bool:
    tensor = dense(tensor)
    # A sum takes a fraction of the time. That of finite numbers may overflow, so it alone does not prove infinity.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _may_be_infinite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


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
