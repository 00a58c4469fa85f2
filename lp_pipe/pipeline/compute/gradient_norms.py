"""The norm of all gradients from those of single ones, as torch.nn.utils.clip_grad_norm_ makes it in one process."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lp_pipe.private_torch import grouped_by_dtype, norms_of_each


class GradientNorm(NamedTuple):
    """The 2-norm of one gradient, on the host, to be sent. dtype: the gradient's; a complex one has a real norm."""

    norm: Tensor
    dtype: torch.dtype


def norms_of(gradients: Iterable[Tensor]) -> list[GradientNorm]:
    """In their order."""
    gradients = list(gradients)
    found = norms_of_each(gradients) if gradients else ()
    return [GradientNorm(norm.cpu(), gradient.dtype) for norm, gradient in zip(found, gradients, strict=True)]


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
    return [norms[index].norm for positions in grouped_by_dtype(stand_ins) for index in positions]
