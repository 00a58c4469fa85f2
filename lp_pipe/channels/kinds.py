"""Which kind of channel joins two nodes: by what they are to each other, or as the program says. Needs no torch."""

import os
import secrets

from lp_pipe.connections import Connection, PulledConnection, run_endpoints, same_host
from lp_pipe.connections.kernel_calls import has_epoll, has_memfd

KINDS = ("auto", "inproc", "shm", "grpc", "gloo", "nccl")
NEAR_KINDS = ("inproc", "shm")  # which never reach another host
PLAIN_KINDS = ("gloo", "nccl")  # whose tensors anybody can read who reads what passes on the network

# What fits the carrier that an endpoint's scheme names, the best first.
_FITTING = {
    "inproc": ("inproc", "gloo", "nccl", "stream"),
    "unix": ("shm", "gloo", "nccl", "stream"),
    "local": ("shm", "gloo", "nccl", "stream"),
    "grpc": ("grpc",),
    "grpcs": ("grpc", "gloo", "nccl"),  # "auto" is never one of PLAIN_KINDS
    "tls": ("grpc", "gloo", "nccl"),
}


def is_shm_supported() -> bool:
    """Return whether channels can go through memory without a name, which is gone with the processes that use it."""
    return has_memfd() and has_epoll() and os.path.isdir("/proc/self/fd")


def choose(kind: str, endpoint: str, *, is_on_gpu: bool = False) -> str:
    """The transport for `kind`, which may be "auto", to `endpoint`.

    is_on_gpu: whether the sender's tensors are; through shared memory they stay on GPUs if the receiver can read them.

    Raises:
        ValueError: the kind does not exist, or not for this endpoint.
    """
    fitting = _fitting(endpoint)
    if kind == "auto":
        kind = fitting[0]
    if kind not in fitting:
        known = "" if kind in KINDS else "is unknown and "
        why = " (the receiving end listens at no grpc endpoint)" if kind == "grpc" else ""
        usable = ", ".join(repr(name) for name in ("auto", *fitting))
        raise ValueError(f"channel kind {kind!r} {known}does not fit {_shown(endpoint)}{why}: use one of {usable}")
    if kind != "shm":
        return kind
    if not is_shm_supported():
        return "stream"
    return "cuda_ipc" if is_on_gpu else "shm"


def _fitting(endpoint: str) -> tuple[str, ...]:
    if endpoint.startswith(run_endpoints.HOSTS):
        return (*_FITTING["unix"], "grpc") if run_endpoints.is_same_host(endpoint) else _FITTING["tls"]
    scheme = "inproc" if same_host.is_same_process(endpoint) else endpoint.partition(":")[0]
    return _FITTING.get(scheme, ("stream",))


def _shown(endpoint: str) -> str:
    """For messages: of a node of a run on several hosts that is what decides, and not the ways to it."""
    if not endpoint.startswith(run_endpoints.HOSTS):
        return endpoint.partition("#")[0]  # without the token
    place = "this host" if run_endpoints.is_same_host(endpoint) else "another host"
    return f"a node on {place} ({run_endpoints.host_name(endpoint)})"


def way(kind: str, endpoint: str) -> str:
    """How a sender of the chosen kind reaches the hub: over the network if it asked for that, also on one host."""
    return (
        run_endpoints.network_endpoint(endpoint)
        if kind == "grpc" and endpoint.startswith(run_endpoints.HOSTS)
        else endpoint
    )


def choice(kind: str, *, same_process: bool) -> str:
    """What `kind` will be between two nodes of one host; for pictures, before there is an endpoint."""
    return choose(kind, "inproc:" if same_process else "unix:") if kind == "auto" else kind


def hub_endpoint(kind: str, usual: str) -> str:
    """Where a hub whose senders will ask for `kind` listens; `usual` is the launcher's choice.

    A hub over gRPC makes a token of its own, which only those learn who are told its endpoint.
    """
    if kind != "grpc" or usual.startswith(run_endpoints.NAME):  # that listens over gRPC in any case
        return usual
    return f"grpc:127.0.0.1:0#{secrets.token_hex(32)}"


def is_pulled(kind: str, connection: Connection) -> bool:
    """Whether the ends read their connection themselves, and no thread of its own.

    Where the tensors go through it, two stages that send to each other, and read only when they have sent, would wait
    for each other for ever: only if sending never waits.
    """
    if not isinstance(connection, PulledConnection) or not is_shm_supported():
        return False
    return kind == "shm" or (is_streamed(kind) and connection.can_begin_sending)


def is_streamed(kind: str) -> bool:
    """Whether the tensors go through the connection itself."""
    return kind in ("stream", "grpc")


def is_posted(kind: str) -> bool:
    """Whether a thread of the channel's own sends what the system has no room for.

    That takes as long as the bytes take to travel. Beside shared memory they are layouts, and large only where there
    are thousands of tensors, or large values that are none; but two stages that sent those to each other would wait
    for each other for ever.
    """
    return is_streamed(kind) or kind in ("shm", "nccl")


def carries_gpu(kind: str) -> bool:
    """Whether tensors of a GPU may be sent as they are."""
    return kind in ("inproc", "nccl", "cuda_ipc")
