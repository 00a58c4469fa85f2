"""The transports of all kinds of channels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels.base import TransportReceiver, TransportSender
from lp_pipe.channels.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from lp_pipe.channels.gloo import GlooReceiver, GlooSender
from lp_pipe.channels.nccl import NcclReceiver, NcclSender
from lp_pipe.channels.packing import Layout, copies
from lp_pipe.channels.ring import RingReceiver, RingSender
from lp_pipe.channels.stream import StreamReceiver, StreamSender


class ReferenceSender(TransportSender):
    """The sending end in one process: copies of the tensors pass by reference.

    Copying makes threads behave like processes: a layer that writes to its input in place must not change what the
    stage before it has saved for its backward.
    """

    def keeps_on_gpu(self) -> bool:
        return True

    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        return 0, copies(layout, tensors)


class ReferenceReceiver(TransportReceiver):
    def accept(self, token: int, buffers: Sequence[Any]) -> Any:
        return buffers

    def read(self, layout: Layout, parcel: Any) -> list[Tensor]:
        return list(parcel)


_TRANSPORTS: dict[str, tuple[Callable[[], TransportSender], Callable[[], TransportReceiver]]] = {
    "inproc": (ReferenceSender, ReferenceReceiver),
    "shm": (RingSender, RingReceiver),
    "stream": (StreamSender, StreamReceiver),
    "gloo": (GlooSender, GlooReceiver),
    "tls": (StreamSender, StreamReceiver),
    "grpc": (StreamSender, StreamReceiver),
}
_OF_GPUS: dict[str, tuple[Callable[[torch.device], TransportSender], Callable[[torch.device], TransportReceiver]]] = {
    "nccl": (NcclSender, NcclReceiver),
    "cuda_ipc": (CudaIpcSender, CudaIpcReceiver),
}


def make_transport_sender(kind: str, address: str, device: torch.device) -> TransportSender:
    """Make the sending end of a transport.

    address: see TransportEnd. device: where this end's tensors are.

    Raises:
        ValueError: this end cannot have such a transport.
    """
    transport = _OF_GPUS[kind][0](_numbered(device)) if kind in _OF_GPUS else _TRANSPORTS[kind][0]()
    transport.address = address
    return transport


def make_transport_receiver(kind: str, address: str, device: torch.device) -> TransportReceiver:
    """Make the receiving end of a transport, like `make_transport_sender`."""
    transport = _OF_GPUS[kind][1](_numbered(device)) if kind in _OF_GPUS else _TRANSPORTS[kind][1]()
    transport.address = address
    return transport


def _numbered(device: torch.device) -> torch.device:
    """Return the device with its number: other threads may have another current GPU."""
    if device.type != "cuda" or device.index is not None or not torch.cuda.is_available():
        return device
    return torch.device("cuda", torch.cuda.current_device())
