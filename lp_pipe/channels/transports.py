"""The table of all transports."""

from lp_pipe.channels.by_reference import ReferenceInlet, ReferenceOutlet
from lp_pipe.channels.gloo import GlooInlet, GlooOutlet
from lp_pipe.channels.ring import RingInlet, RingOutlet
from lp_pipe.channels.stream import StreamInlet, StreamOutlet
from lp_pipe.channels.transport import Inlet, Outlet

_TRANSPORTS: dict[str, tuple[type[Outlet], type[Inlet]]] = {
    "inproc": (ReferenceOutlet, ReferenceInlet),
    "shm": (RingOutlet, RingInlet),
    "stream": (StreamOutlet, StreamInlet),
    "gloo": (GlooOutlet, GlooInlet),
    "grpc": (StreamOutlet, StreamInlet),
}


def make_outlet(kind: str, address: str) -> Outlet:
    """address: see Half."""
    outlet = _TRANSPORTS[kind][0]()
    outlet.address = address
    return outlet


def make_inlet(kind: str, address: str) -> Inlet:
    """address: see Half."""
    inlet = _TRANSPORTS[kind][1]()
    inlet.address = address
    return inlet
