"""Endpoints of servers of a run on several hosts: by unix socket from their own host, by mTLS from the others.

    name:RUN/ADDRESS                                a server of the run, wherever it is right now
    name:RUN/ADDRESS?SCHEME                         to listen there, reached from other hosts by this scheme
    hosts:RUN|HOST|unix:PATH|tls:NAME:PORT          what its process has registered: the host, and both endpoints

A server's port is unknown before it is bound, and changes when the server restarts. So clients hold names. To connect,
a client asks the run where the server is (`RunMember.find`), and uses the endpoint that fits its own host.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from lp_pipe.connections import tcp_carriers, unix
from lp_pipe.connections.base import Connection, Listener, OnConnection
from lp_pipe.connections.credentials import Credentials
from lp_pipe.connections.tcp_liveness import is_unreachable
from lp_pipe.errors import Unauthenticated, Unavailable

NAME, HOSTS = "name:", "hosts:"
SCHEMES = (NAME, HOSTS)
_FIND_PATIENCE_S = 10.0


@dataclass(frozen=True)
class RunMember:
    """The membership of this process in a run on several hosts.

    host: the same for processes that reach each other by unix sockets.
    find: returns where a server is right now, by address.
    socket_dir, reached_at: where its servers listen, for its own host and for the others ("tls:NAME", "grpcs:NAME" or
        "tls:NAME@BIND"); "" for the launcher, which has none.
    silence_s: the silence after which connections to other hosts end.
    """

    run: str
    host: str
    credentials: Credentials = field(repr=False)
    find: "Callable[[str], Future[str]]" = field(repr=False)
    socket_dir: str = ""
    reached_at: str = ""
    silence_s: float = 7.0


class HostEndpoint(NamedTuple):
    """A registered endpoint, parsed."""

    run: str
    host: str
    unix_endpoint: str
    far_endpoint: str

    @classmethod
    def of(cls, endpoint: str) -> "HostEndpoint":
        return cls(*endpoint.removeprefix(HOSTS).split("|"))

    @property
    def is_same_host(self) -> bool:
        """Whether the server is on this process's host."""
        return self.host == _member(self.run).host

    def __str__(self) -> str:
        return HOSTS + "|".join(self)


def join(member: RunMember) -> None:
    """Enable this process to reach the servers of the run, and to serve in it."""
    _members[member.run] = member


def leave(run: str) -> None:
    """Make connections to the run fail from now on, because it has ended."""
    if _members.pop(run, None) is not None:
        _left.add(run)


def name_of(run: str, address: str) -> str:
    return f"{NAME}{run}/{address}"


def reached_by(name: str, scheme: str) -> str:
    """Return where to listen for a server that other hosts reach by `scheme`, whatever the run's transport is."""
    return f"{name}?{scheme}"


def split_name(name: str) -> tuple[str, str]:
    """Return the run and the address that `name_of` was given."""
    run, _, address = name.removeprefix(NAME).partition("/")
    return run, address


def endpoint_to_register(endpoint: str) -> str:
    """Return what other processes must be told of a listener of this process: for a `name:`, its `hosts:` endpoint."""
    listener = _listeners.get(endpoint)
    return str(listener.host_endpoint) if listener is not None else endpoint


def is_same_host(endpoint: str) -> bool:
    """Return whether the server at this `hosts:` endpoint is on this process's host."""
    return HostEndpoint.of(endpoint).is_same_host


def host_name(endpoint: str) -> str:
    """Return the launcher's name for the host of this `hosts:` endpoint."""
    return _named(HostEndpoint.of(endpoint).host)


def _named(host: str) -> str:
    return host.rsplit("/", 1)[0]


def is_other_host(endpoint: str) -> bool:
    """Return whether this is a `hosts:` endpoint of another host than this process's."""
    return endpoint.startswith(HOSTS) and not is_same_host(endpoint)


def network_endpoint(endpoint: str) -> str:
    """Return an endpoint of the same listener that is reached over the network even from its own host."""
    host_endpoint = HostEndpoint.of(endpoint)
    return str(host_endpoint._replace(host=f"{_named(host_endpoint.host)}/"))  # no process has a host of this name


def listen_address(run: str) -> str:
    """Return where servers of this process listen for other hosts; "" without such servers or without the run."""
    reached_at = _members[run].reached_at if run in _members else ""
    name, _, bind = reached_at.partition(":")[2].partition("@")
    return (bind or name).strip("[]")


def server_name(endpoint: str) -> str:
    """Return the `name:` of the server at a `hosts:` endpoint; any other endpoint is returned as it is."""
    if not endpoint.startswith(HOSTS):
        return endpoint
    host_endpoint = HostEndpoint.of(endpoint)
    return name_of(host_endpoint.run, host_endpoint.unix_endpoint.rpartition("/")[2])


class RunListener(Listener):
    def __init__(self, name: str, on_connection: OnConnection) -> None:
        name, _, scheme = name.partition("?")
        run, address = split_name(name)
        member = _member(run)
        self.endpoint = name  # clients use it, too; see `endpoint_to_register`
        self._unix_listener = unix.listen(f"{unix.SCHEME}{member.socket_dir}/{address}", on_connection)
        try:
            usual, colon, reached_at = member.reached_at.partition(":")
            where = f"{scheme or usual + colon}{reached_at}:0"
            carrier = tcp_carriers.carrier_of(where)
            self._far_listener: Listener = carrier.listen(where, on_connection, member.credentials, member.silence_s)
        except BaseException:
            self._unix_listener.close()
            raise
        self.host_endpoint = HostEndpoint(run, member.host, self._unix_listener.endpoint, self._far_listener.endpoint)
        _listeners[name] = self

    def close(self, reason: str = "closed") -> None:
        if _listeners.get(self.endpoint) is self:
            del _listeners[self.endpoint]
        self._unix_listener.close(reason)
        self._far_listener.close(reason)


def listen(endpoint: str, on_connection: OnConnection) -> Listener:
    """Listen for both kinds of clients under a `name:`.

    Raises:
        OSError: the socket or a port cannot be bound.
    """
    return RunListener(endpoint, on_connection)


def connect(endpoint: str, idle_timeout_s: float | None = None) -> Connection:
    """Connect to a server of the run; for a `name:`, ask where it is.

    Raises:
        Unavailable: nothing listens there now.
    """
    if endpoint.startswith(NAME):
        run, address = split_name(endpoint)
        endpoint = _found(_member(run), address)
    host_endpoint = HostEndpoint.of(endpoint)
    member = _member(host_endpoint.run)
    if host_endpoint.host == member.host:
        return unix.connect(host_endpoint.unix_endpoint, idle_timeout_s)
    far_endpoint = host_endpoint.far_endpoint
    try:
        found: Connection = tcp_carriers.carrier_of(far_endpoint).connect(
            far_endpoint, idle_timeout_s, member.credentials, member.silence_s
        )
        return found
    except Unavailable as error:
        if is_unreachable(error.__cause__):  # both hosts reach the launcher, so each looks healthy
            raise Unavailable(_unreachable_message(member.host, host_endpoint, str(error.__cause__))) from error
        raise


def _unreachable_message(host: str, host_endpoint: HostEndpoint, why: str) -> str:
    ends = [f"host {_named(one)}" if "/" in one else one for one in (host, host_endpoint.host)]
    where = host_endpoint.far_endpoint.partition(":")[2]
    return f"{ends[0]} does not reach {ends[1]} at {where} ({why}): a firewall? --interface chooses another network"


def _found(member: RunMember, address: str) -> str:
    try:
        return member.find(address).result(_FIND_PATIENCE_S)
    except TimeoutError:
        raise Unavailable(
            f"the launcher did not answer within {_FIND_PATIENCE_S:g} s where {address} listens"
        ) from None


def _member(run: str) -> RunMember:
    if run in _left:
        raise Unavailable(f"run {run} has ended")
    if run not in _members:
        raise Unauthenticated(
            f"this process does not belong to run {run}, and its servers accept only its own processes"
        )
    return _members[run]


_members: dict[str, RunMember] = {}
_left: set[str] = set()
_listeners: dict[str, RunListener] = {}
os.register_at_fork(after_in_child=_members.clear)  # a fork of the launcher is no member; nodes join after their fork
