"""Which transport a channel uses: the choice, and the table of all."""

from lp_pipe.channels.by_reference import ReferenceInlet, ReferenceOutlet
from lp_pipe.channels.ring import RingInlet, RingOutlet
from lp_pipe.channels.ring import is_supported as is_ring_supported
from lp_pipe.channels.stream import StreamInlet, StreamOutlet
from lp_pipe.channels.transport import Inlet, Outlet
from lp_pipe.connections import local

_TRANSPORTS: dict[str, tuple[type[Outlet], type[Inlet]]] = {
    "inproc": (ReferenceOutlet, ReferenceInlet),
    "shm": (RingOutlet, RingInlet),
    "stream": (StreamOutlet, StreamInlet),
}
# What fits the carrier that an endpoint's scheme names, the best first.
_FITTING = {"inproc": ("inproc", "stream"), "unix": ("shm", "stream"), "local": ("shm", "stream")}


def choose(kind: str, endpoint: str) -> str:
    """The transport for `kind`, which may be "auto", to `endpoint`.

    Raises:
        ValueError: the kind does not exist, or not for this endpoint.
    """
    scheme = "inproc" if local.is_inside(endpoint) else endpoint.partition(":")[0]
    fitting = _FITTING.get(scheme, ("stream",))
    if kind == "auto":
        kind = fitting[0]
    if kind not in fitting:
        known = "" if kind in _TRANSPORTS else "is unknown and "
        usable = ", ".join(repr(name) for name in ("auto", *fitting))
        raise ValueError(f"channel kind {kind!r} {known}does not fit {endpoint}: use one of {usable}")
    # macOS has no memfd_create; a named segment would outlive a killed process.
    return "stream" if kind == "shm" and not is_ring_supported else kind


def make_outlet(kind: str) -> Outlet:
    return _TRANSPORTS[kind][0]()


def make_inlet(kind: str) -> Inlet:
    return _TRANSPORTS[kind][1]()
