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


def make_outlet(kind: str) -> Outlet:
    return _TRANSPORTS[kind][0]()


def make_inlet(kind: str) -> Inlet:
    return _TRANSPORTS[kind][1]()
