"""The kinds of channels, and the choice between them. Needs no torch: graphs and dry runs ask here, too."""

import os
import secrets
from typing import ClassVar

from lp_pipe.connections import Connection, PulledConnection, run_endpoints, same_host
from lp_pipe.connections.kernel_calls import has_epoll, has_memfd
from lp_pipe.connections.tcp_endpoint import PLAIN, SECURE, TLS


def is_shm_supported() -> bool:
    """Return whether this system has shared memory without a name, which is freed with the processes that use it."""
    return has_memfd() and has_epoll() and os.path.isdir("/proc/self/fd")


class ChannelKind:
    """The traits of one kind of channel. The transports that move its bytes are in registry.py.

    name: as in `channel=`, and in a sender's opening message.
    crosses_hosts: whether sender and receiver may be on two hosts.
    is_encrypted: False if a reader of the network's traffic can read the tensors.
    carries_gpu: whether a GPU's tensors can be sent as they are.
    is_streamed: whether the tensors themselves go through the channel's connection.
    is_sent_by_thread: whether a thread of the channel sends what the system has no room for. That takes as long as
        the bytes travel. Beside shared memory the connection carries layouts only, and those are large only if there
        are thousands of tensors, or large values that are not tensors; but two stages that sent such layouts to each
        other would deadlock.
    has_shm_queue: whether both ends can tell each other of messages through shared memory (shm_queue.py).
    """

    name: ClassVar[str]
    crosses_hosts: ClassVar[bool] = True
    is_encrypted: ClassVar[bool] = True
    carries_gpu: ClassVar[bool] = False
    is_streamed: ClassVar[bool] = False
    is_sent_by_thread: ClassVar[bool] = False
    has_shm_queue: ClassVar[bool] = False

    def hub_endpoint(self, usual: str) -> str:
        """Return where a hub for senders of this kind listens; `usual` is the launcher's choice.

        Raises:
            ValueError: no hub of this program can receive this kind.
        """
        return usual

    def sender_endpoint(self, endpoint: str) -> str:
        """Return the endpoint at which a sender of this kind reaches the hub."""
        return endpoint

    def is_read_by_owner(self, connection: Connection) -> bool:
        """Return whether the channel's ends read their connection themselves, without a thread of the connection."""
        return False


class InprocKind(ChannelKind):
    """Between threads of one process: copies pass by reference."""

    name = "inproc"
    crosses_hosts = False
    carries_gpu = True


class ShmKind(ChannelKind):
    """Between processes of one host, through slots of shared memory."""

    name = "shm"
    crosses_hosts = False
    is_sent_by_thread = True
    has_shm_queue = True

    def is_read_by_owner(self, connection: Connection) -> bool:
        return isinstance(connection, PulledConnection) and is_shm_supported()


class CudaIpcKind(ChannelKind):
    """The kind that "shm" becomes for tensors on a GPU: the receiver copies from the sender's GPU memory."""

    name = "cuda_ipc"
    crosses_hosts = False
    carries_gpu = True


class StreamKind(ChannelKind):
    """Through the channel's connection, whichever carrier it has; what "shm" becomes without shared memory."""

    name = "stream"
    is_streamed = True
    is_sent_by_thread = True

    def is_read_by_owner(self, connection: Connection) -> bool:
        # Two stages that send to each other and read only afterwards would deadlock if sending could wait.
        is_readable = isinstance(connection, PulledConnection) and is_shm_supported()
        return is_readable and connection.can_begin_sending


class NetworkKind(StreamKind):
    """Through a connection over TCP, also between two nodes of one host."""

    def sender_endpoint(self, endpoint: str) -> str:
        return run_endpoints.network_endpoint(endpoint) if endpoint.startswith(run_endpoints.HOSTS) else endpoint


class TlsKind(NetworkKind):
    """Between hosts, over TLS 1.3 sockets."""

    name = "tls"

    def hub_endpoint(self, usual: str) -> str:
        if usual.startswith(run_endpoints.NAME):
            return run_endpoints.reached_by(usual, TLS)
        if usual.startswith(TLS):
            return usual
        raise ValueError(
            "channel kind 'tls' joins nodes of a program with mode='multi_host', whose processes have certificates: "
            "use channel='auto'"
        )


class GrpcKind(NetworkKind):
    """Over a gRPC stream, with mTLS between hosts."""

    name = "grpc"

    def hub_endpoint(self, usual: str) -> str:
        if usual.startswith(run_endpoints.NAME):
            return run_endpoints.reached_by(usual, SECURE)
        return f"{PLAIN}127.0.0.1:0#{secrets.token_hex(32)}"  # only processes that are told the endpoint know the token


class GlooKind(ChannelKind):
    """Over a connection of torch.distributed's gloo, for CPU tensors."""

    name = "gloo"
    is_encrypted = False


class NcclKind(ChannelKind):
    """Over NCCL, for tensors on GPUs."""

    name = "nccl"
    is_encrypted = False
    carries_gpu = True
    is_sent_by_thread = True


_ALL = (InprocKind(), ShmKind(), CudaIpcKind(), StreamKind(), TlsKind(), GrpcKind(), GlooKind(), NcclKind())
_BY_NAME = {kind.name: kind for kind in _ALL}
_CHOSEN_HERE = ("cuda_ipc", "stream")  # `choose` makes these of others

NAMES = ("auto", *(kind.name for kind in _ALL if kind.name not in _CHOSEN_HERE))

# The kinds that can use the carrier of an endpoint's scheme. "auto" is the first one, which is always encrypted.
_FITTING = {
    "inproc": ("inproc", "gloo", "nccl", "stream"),
    "unix": ("shm", "gloo", "nccl", "stream"),
    "local": ("shm", "gloo", "nccl", "stream"),
    "grpc": ("grpc",),
    "grpcs": ("grpc", "gloo", "nccl"),
    "tls": ("tls", "gloo", "nccl"),
}


def named(name: str) -> ChannelKind:
    """Return the kind of this name."""
    return _BY_NAME[name]


def choose(name: str, endpoint: str, *, is_on_gpu: bool = False) -> ChannelKind:
    """Return the kind that `name`, which may be "auto", is for a hub at `endpoint`.

    is_on_gpu: whether the sender's tensors are; through shared memory they stay on GPUs if the receiver can read them.

    Raises:
        ValueError: the kind does not exist, or cannot use the endpoint's carrier.
    """
    fitting = _fitting(endpoint)
    if name == "auto":
        name = fitting[0]
    if name not in fitting:
        known = "" if name in NAMES else "is unknown and "
        usable = ", ".join(repr(one) for one in ("auto", *fitting))
        raise ValueError(f"channel kind {name!r} {known}does not fit {_shown(endpoint)}: use one of {usable}")
    if name == "shm" and not is_shm_supported():
        name = "stream"
    elif name == "shm" and is_on_gpu:
        name = "cuda_ipc"
    return _BY_NAME[name]


def preview(name: str, *, same_process: bool) -> str:
    """Return which kind `name` will be between two nodes of one host, before there is an endpoint."""
    return choose(name, "inproc:" if same_process else "unix:").name if name == "auto" else name


def _fitting(endpoint: str) -> tuple[str, ...]:
    if endpoint.startswith(run_endpoints.HOSTS):
        by_network = _FITTING[run_endpoints.HostEndpoint.of(endpoint).far_endpoint.partition(":")[0]]
        return (*_FITTING["unix"], by_network[0]) if run_endpoints.is_same_host(endpoint) else by_network
    scheme = "inproc" if same_host.is_same_process(endpoint) else endpoint.partition(":")[0]
    return _FITTING.get(scheme, ("stream",))


def _shown(endpoint: str) -> str:
    """Return what messages call the hub: for a run on several hosts its host, else the endpoint without its token."""
    if not endpoint.startswith(run_endpoints.HOSTS):
        return endpoint.partition("#")[0]
    place = "this host" if run_endpoints.is_same_host(endpoint) else "another host"
    return f"a node on {place} ({run_endpoints.host_name(endpoint)})"
