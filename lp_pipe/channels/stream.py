"""A transport over any connection: the tensors' bytes are the frame's buffers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels.base import TransportReceiver, TransportSender
from lp_pipe.channels.buffer_pool import BufferPool
from lp_pipe.channels.packing import Layout, TensorSpec, empty_tensor, tensor_over


class StreamSender(TransportSender):
    """The sending end. Its buffers are copies, because they are sent later, when the tensors may have changed."""

    has_tokens = False

    def __init__(self) -> None:
        self._memory = BufferPool()

    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        pairs = zip(layout.tensor_specs, tensors, strict=True)
        return 0, [_bytes_of(self._memory.empty(spec).copy_(tensor)) for spec, tensor in pairs if spec.size_bytes]


class StreamReceiver(TransportReceiver):
    has_tokens = False

    def accept(self, token: int, buffers: Sequence[Any]) -> Any:
        return buffers

    def read(self, layout: Layout, parcel: Any) -> list[Tensor]:
        buffers = iter(parcel)
        return [_tensor_of(spec, next(buffers) if spec.size_bytes else b"") for spec in layout.tensor_specs]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's stubs have no Buffer in 3.11


def _tensor_of(spec: TensorSpec, data: Any) -> Tensor:
    if not spec.size_bytes:
        return empty_tensor(spec)
    return tensor_over(torch.frombuffer(data, dtype=torch.uint8), 0, spec)
