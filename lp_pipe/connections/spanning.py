"""Servers of a run on several hosts: reached by unix socket from their own host, by mTLS from the others.

    name:RUN/ADDRESS                                a server of the run, wherever it is right now
    hosts:RUN|HOST|unix:PATH|tls:NAME:PORT          what its process has registered: the host, and both ways to it

Nobody knows a server's port before it has bound one, and another one has another. So clients hold names, and whoever
connects asks the run where the server is (`Member.find`), and takes the way that fits its own host.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from lp_pipe.connections import unix
from lp_pipe.connections.base import Connection, Listener, OnConnection
from lp_pipe.connections.credentials import Credentials
from lp_pipe.connections.reach import is_out_of_reach
from lp_pipe.connections.tcp_endpoint import TLS
from lp_pipe.errors import Unauthenticated, Unavailable

NAME, WAYS = "name:", "hosts:"
SCHEMES = (NAME, WAYS)
_FIND_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Member:
    """What this process is in a run on several hosts.

    host: the same for processes that reach each other by unix sockets. find: where a server is right now, by address.
    socket_dir, reached_at: where its servers listen, for its own host and for the others ("NAME" or "NAME@BIND");
    "" for the launcher, which has none. silence_s: after which connections to other hosts have ended.
    """

    run: str
    host: str
    credentials: Credentials = field(repr=False)
    find: "Callable[[str], Future[str]]" = field(repr=False)
    socket_dir: str = ""
    reached_at: str = ""
    silence_s: float = 7.0


class Ways(NamedTuple):
    """A registered endpoint, taken apart."""

    run: str
    host: str
    near: str
    far: str

    @classmethod
    def of(cls, endpoint: str) -> "Ways":
        return cls(*endpoint.removeprefix(WAYS).split("|"))

    @property
    def is_near(self) -> bool:
        """Whether it is on this process's host."""
        return self.host == _member(self.run).host

    def __str__(self) -> str:
        return WAYS + "|".join(self)


def join(member: Member) -> None:
    """From now on this process can reach the servers of the run, and serve in it."""
    _members[member.run] = member


def leave(run: str) -> None:
    """The run has ended."""
    if _members.pop(run, None) is not None:
        _left.add(run)


def name_of(run: str, address: str) -> str:
    return f"{NAME}{run}/{address}"


def run_and_address(name: str) -> tuple[str, str]:
    """What `name_of` was given."""
    run, _, address = name.removeprefix(NAME).partition("/")
    return run, address


def registered(endpoint: str) -> str:
    """What others must be told of a listener of this process: of one with a name, its two ways."""
    listener = _listeners.get(endpoint)
    return str(listener.ways) if listener is not None else endpoint


def is_near(endpoint: str) -> bool:
    """Whether what listens at this `hosts:` endpoint is on this process's host."""
    return Ways.of(endpoint).is_near


def host_name(endpoint: str) -> str:
    """Of what listens at this `hosts:` endpoint, as the launcher calls its host."""
    return _named(Ways.of(endpoint).host)


def _named(host: str) -> str:
    return host.rsplit("/", 1)[0]


def is_far(endpoint: str) -> bool:
    """Whether this is a `hosts:` endpoint, of another host than this process's."""
    return endpoint.startswith(WAYS) and not is_near(endpoint)


def far_way(endpoint: str) -> str:
    """The same listener, to be reached over the network even from its own host."""
    ways = Ways.of(endpoint)
    return str(ways._replace(host=f"{_named(ways.host)}/"))  # no process calls its own host so


def own_address(run: str) -> str:
    """At which servers of this process listen for other hosts of the run; "" where it has none, or there is no run."""
    reached_at = _members[run].reached_at if run in _members else ""
    name, _, bind = reached_at.partition("@")
    return (bind or name).strip("[]")


def known_as(endpoint: str) -> str:
    """The name of what listens at a `hosts:` endpoint; another endpoint is its own."""
    if not endpoint.startswith(WAYS):
        return endpoint
    ways = Ways.of(endpoint)
    return name_of(ways.run, ways.near.rpartition("/")[2])


class SpanningListener(Listener):
    def __init__(self, name: str, on_connection: OnConnection) -> None:
        from lp_pipe.connections import tls  # of no use to most processes

        run, address = run_and_address(name)
        member = _member(run)
        self.endpoint = name  # what clients call it, too; see `registered`
        self._near = unix.listen(f"{unix.SCHEME}{member.socket_dir}/{address}", on_connection)
        try:
            where = f"{TLS}{member.reached_at}:0"
            self._far = tls.listen(where, on_connection, member.credentials, member.silence_s)
        except BaseException:
            self._near.close()
            raise
        self.ways = Ways(run, member.host, self._near.endpoint, self._far.endpoint)
        _listeners[name] = self

    def close(self, reason: str = "closed") -> None:
        if _listeners.get(self.endpoint) is self:
            del _listeners[self.endpoint]
        self._near.close(reason)
        self._far.close(reason)


def listen(endpoint: str, on_connection: OnConnection) -> Listener:
    """Listen both ways under a `name:`.

    Raises:
        OSError: the socket or a port cannot be bound.
    """
    return SpanningListener(endpoint, on_connection)


def connect(endpoint: str, idle_timeout_s: float | None = None) -> Connection:
    """Connect to a server of the run; asks where it is, if this is its name.

    Raises:
        Unavailable: nobody listens there now.
    """
    if endpoint.startswith(NAME):
        run, address = run_and_address(endpoint)
        endpoint = _found(_member(run), address)
    ways = Ways.of(endpoint)
    member = _member(ways.run)
    if ways.host == member.host:
        return unix.connect(ways.near, idle_timeout_s)
    from lp_pipe.connections import tls

    try:
        return tls.connect(ways.far, idle_timeout_s, member.credentials, member.silence_s)
    except Unavailable as error:
        if is_out_of_reach(error.__cause__):  # each is the launcher's friend, so it looks as if both were well
            raise Unavailable(_no_way(member.host, ways, str(error.__cause__))) from error
        raise


def _no_way(host: str, ways: Ways, why: str) -> str:
    ends = [f"host {_named(one)}" if "/" in one else one for one in (host, ways.host)]
    where = ways.far.removeprefix(TLS)
    return f"{ends[0]} does not reach {ends[1]} at {where} ({why}): a firewall? --interface chooses another network"


def _found(member: Member, address: str) -> str:
    try:
        return member.find(address).result(_FIND_PATIENCE_S)
    except TimeoutError:
        raise Unavailable(f"the launcher has not said for {_FIND_PATIENCE_S:g} s where {address} listens") from None


def _member(run: str) -> Member:
    if run in _left:
        raise Unavailable(f"run {run} has ended")
    if run not in _members:
        raise Unauthenticated(f"this process does not belong to run {run}: nobody would answer it there")
    return _members[run]


_members: dict[str, Member] = {}
_left: set[str] = set()
_listeners: dict[str, SpanningListener] = {}
os.register_at_fork(after_in_child=_members.clear)  # a launcher's fork is no member; nodes join after their fork
