"""Whether tensors hold NaN or infinity."""

from typing import Any

from torch import Tensor

from lp_pipe.pipeline.layers.message import tensors_of
from lp_pipe.private_torch import sparse_values


def is_finite(value: Any) -> bool:
    """Whether no tensor of a value holds NaN or infinity."""
    return all(_is_finite(tensor.detach()) for tensor in tensors_of(value) if _may_be_infinite(tensor))


def dense(tensor: Tensor) -> Tensor:
    """All numbers of a tensor that may be sparse, as the gradient of an nn.Embedding(sparse=True) is."""
    return sparse_values(tensor) if tensor.is_sparse else tensor


def _is_finite(tensor: Tensor) -> bool:
    tensor = dense(tensor)
    # A sum takes a fraction of the time; one of finite numbers may be too large for a number.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _may_be_infinite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
