"""The check which tensors a channel can send: plain dense ones, which their bytes describe completely."""

import torch
from torch import Tensor

# torch cannot copy tensors of these dtypes.
_NOT_COPIED = {
    getattr(torch, name, None) for name in [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
}


def is_copyable(tensor: Tensor) -> bool:
    """Return whether torch can make a dense copy of the tensor, bit by bit."""
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return is_dense and tensor.dtype not in _NOT_COPIED


def check_sendable(tensor: Tensor, carries_gpu: bool) -> None:
    """Refuse a tensor that a channel cannot send.

    Raises:
        ValueError: says what to send instead.
    """
    if tensor.dtype in _NOT_COPIED:
        raise ValueError(f"a channel cannot carry {tensor.dtype}: send tensor.view(torch.uint8)")
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise ValueError(
            f"a channel carries plain dense tensors, not a {type(tensor).__name__}: return a torch.Tensor in the layer"
        )
    if not is_copyable(tensor):
        kind, dense = _how_to_make_dense(tensor)
        raise ValueError(f"a channel carries dense tensors, not one that is {kind}: return {dense} in the layer")
    if not (tensor.is_cpu or (carries_gpu and tensor.is_cuda)):
        raise ValueError(f"this channel carries CPU tensors, not one on {tensor.device}: send tensor.cpu()")


def _how_to_make_dense(tensor: Tensor) -> tuple[str, str]:
    """Return what the tensor is, and an expression for a dense tensor of the same values."""
    if tensor.is_quantized:
        return "quantized", "tensor.dequantize()"
    if tensor.is_nested:
        return "nested", "torch.nested.to_padded_tensor(tensor, 0.0), or its parts,"
    return f"of layout {tensor.layout}", "tensor.to_dense()"
