"""The table of all transports."""

from collections.abc import Callable

import torch

from lp_pipe.channels.by_reference import ReferenceInlet, ReferenceOutlet
from lp_pipe.channels.cuda_ipc import CudaIpcInlet, CudaIpcOutlet
from lp_pipe.channels.gloo import GlooInlet, GlooOutlet
from lp_pipe.channels.nccl import NcclInlet, NcclOutlet
from lp_pipe.channels.ring import RingInlet, RingOutlet
from lp_pipe.channels.stream import StreamInlet, StreamOutlet
from lp_pipe.channels.transport import Inlet, Outlet

_TRANSPORTS: dict[str, tuple[Callable[[], Outlet], Callable[[], Inlet]]] = {
    "inproc": (ReferenceOutlet, ReferenceInlet),
    "shm": (RingOutlet, RingInlet),
    "stream": (StreamOutlet, StreamInlet),
    "gloo": (GlooOutlet, GlooInlet),
    "grpc": (StreamOutlet, StreamInlet),
}
_OF_GPUS: dict[str, tuple[Callable[[torch.device], Outlet], Callable[[torch.device], Inlet]]] = {
    "nccl": (NcclOutlet, NcclInlet),
    "cuda_ipc": (CudaIpcOutlet, CudaIpcInlet),
}


def make_outlet(kind: str, address: str, device: torch.device) -> Outlet:
    """address: see Half. device: where this end's tensors are.

    Raises:
        ValueError: this end cannot have such a transport.
    """
    outlet = _OF_GPUS[kind][0](_numbered(device)) if kind in _OF_GPUS else _TRANSPORTS[kind][0]()
    outlet.address = address
    return outlet


def make_inlet(kind: str, address: str, device: torch.device) -> Inlet:
    """As `make_outlet`."""
    inlet = _OF_GPUS[kind][1](_numbered(device)) if kind in _OF_GPUS else _TRANSPORTS[kind][1]()
    inlet.address = address
    return inlet


def _numbered(device: torch.device) -> torch.device:
    """Other threads have another current GPU."""
    if device.type != "cuda" or device.index is not None or not torch.cuda.is_available():
        return device
    return torch.device("cuda", torch.cuda.current_device())
