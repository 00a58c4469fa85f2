"""The norm of all gradients from those of single ones, as torch.nn.utils.clip_grad_norm_ makes it in one process."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


class GradientNorm(NamedTuple):
    """The 2-norm of one gradient, on the host, to be sent. dtype: the gradient's; a complex one has a real norm."""

    norm: Tensor
    dtype: torch.dtype


def norms_of(gradients: Iterable[Tensor]) -> list[GradientNorm]:
    """In their order."""
    gradients = list(gradients)
    norms = torch._foreach_norm(gradients) if gradients else ()
    return [GradientNorm(norm.cpu(), gradient.dtype) for norm, gradient in zip(norms, gradients, strict=True)]


def total_norm(norms: Sequence[GradientNorm], device: torch.device) -> Tensor | None:
    """Of gradients in the order of their parameters; computed on `device`, as the plain loop does, for the host."""
    if not norms:
        return None
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in _as_torch_adds(norms, device)]))
    return total.cpu()


def _as_torch_adds(norms: Sequence[GradientNorm], device: torch.device) -> list[Tensor]:
    """One dtype after the other, which torch orders by a hash; the sum of squares depends on the order."""
    if len({dtype for _, dtype in norms}) == 1:
        return [norm for norm, _ in norms]
    stand_ins = [torch.empty(0, dtype=dtype, device=device) for _, dtype in norms]
    groups = _group_tensors_by_device_and_dtype([stand_ins], with_indices=True).values()  # type: ignore[list-item]
    return [norms[index].norm for _, indices in groups for index in indices]
