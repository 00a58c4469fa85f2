"""The start of a run's agents by its engine, and the wait until all have joined."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from lp_pipe.connections import Connection, Frame, Listener, frames, tcp_carriers
from lp_pipe.connections.credentials import Credentials
from lp_pipe.connections.io_thread import SilenceWatch
from lp_pipe.connections.tcp_endpoint import bracketed
from lp_pipe.errors import LaunchError
from lp_pipe.launch.engines.base import Engine, HostOffer, Invitation, StartedAgent, kill_all
from lp_pipe.launch.hosts import handshake
from lp_pipe.launch.hosts.agent_messages import Alive
from lp_pipe.launch.hosts.handshake import Joining, Versions
from lp_pipe.launch.hosts.network import addresses_for
from lp_pipe.launch.hosts.source_tree import SourceTree
from lp_pipe.launch.options import LaunchOptions
from lp_pipe.launch.supervision.peer import Peer
from lp_pipe.rpc import codec
from lp_pipe.telemetry.names import name_list

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2
_MORE_NEWS_S = 1.0  # the reason that keeps one host from joining often keeps others, too
_ALIVE_EVERY_S = 1.0
_MOST_SILENCE_S = 86_400.0

OnLost = Callable[["RemoteAgent", str], None]
OnJoined = Callable[["RemoteAgent"], None]


@dataclass(frozen=True)
class Patience:
    """join_s: for all agents to join. silence_s: a host that says nothing for so long counts as lost."""

    join_s: float = 60.0
    silence_s: float = 7.0

    def __post_init__(self) -> None:
        if not isinstance(self.join_s, int | float) or not self.join_s > 0:
            raise ValueError(f"join_timeout={self.join_s!r}: more than 0 seconds, the hosts need some to join")
        if not isinstance(self.silence_s, int | float) or not 1.0 <= self.silence_s <= _MOST_SILENCE_S:
            raise ValueError(f"host_timeout={self.silence_s!r}: from 1 to {_MOST_SILENCE_S:g} seconds")


@dataclass(frozen=True)
class KeptHosts:
    """Hosts that have joined before, and outlive the program: it runs on the first `used`, the others are spares."""

    host_join: "HostJoin"
    credentials: Credentials
    agents: Mapping[str, "RemoteAgent"]
    used: int


@dataclass(frozen=True)
class MultiHostOptions:
    """The options of a run on several hosts.

    listen: the address or name by which the hosts reach the launcher, "NAME" or "NAME@BIND"; "": found out.
    interface: see Invitation.
    transport: "auto", "tls" or "grpc", what carries all traffic between hosts.
    tree: sources that every host is given. kept: of an elastic run; None: the program has hosts of its own.
    """

    engine: Engine
    listen: str = ""
    interface: str = ""
    patience: Patience = field(default_factory=Patience)
    tree: SourceTree | None = None
    kept: KeptHosts | None = None
    transport: str = "auto"

    def __post_init__(self) -> None:
        tcp_carriers.scheme_of(self.transport)

    @classmethod
    def of(cls, options: LaunchOptions) -> Self:
        """Return what the options mean.

        Raises:
            ValueError: an option is none that there is; as `LaunchOptions.make_engine`.
            LaunchError: the folder of sources cannot be read.
        """
        engine, patience = options.make_engine(), Patience(options.join_timeout, options.host_timeout)
        tree = None if options.sync is None else SourceTree.of(options.sync)
        return cls(engine, options.listen, options.interface, patience, tree, transport=options.transport)

    @property
    def carrier(self) -> str:
        """The transport's name, where "auto" is the default one."""
        return "tls" if self.transport == "auto" else self.transport


class RemoteAgent(Peer):
    """The launcher's end of one agent, from its first message on; the program that it runs sets `handle`."""

    joining: Joining
    is_silent = False  # the launcher has given it up because it was silent; it may be alive

    def __init__(self, connection: Connection, host_join: "HostJoin", silence_s: float) -> None:
        super().__init__(connection, lambda message: None, codec)  # handles Alive: its arrival is all that counts
        self.has_joined = False
        self._host_join = host_join
        self._watch = SilenceWatch(silence_s, self._on_silence, connection.peer)
        self._silence_s = silence_s

    @property
    def name(self) -> str:
        return self.joining.host

    def start(self) -> None:
        """Listen for the agent's first message; a silence counts from now on."""
        self._watch.listening()
        super().start()

    def on_frame(self, frame: Frame) -> None:
        self._watch.heard()
        self._watch.listening()
        if self.has_joined:
            super().on_frame(frame)
            return
        try:
            if frame.name != handshake.JOIN:
                raise LaunchError(f"an agent begins with {handshake.JOIN!r}, not with {frame.name[:100]!r}")
            self.joining = Joining.from_bytes(bytes(frame.body))
            self._host_join.join(self)
        except LaunchError as error:
            self._host_join.refused(str(error))
            self.connection.close(str(error))

    def welcome(self) -> None:
        """Accept the agent: everything that is sent from now on comes after this message."""
        self.has_joined = True
        self.connection.send(Frame(frames.SUPERVISION, name=handshake.WELCOME))

    def _on_silence(self) -> None:
        self.is_silent = True
        self.connection.close(f"nothing was heard of it for {self._silence_s:g} s: the host is down, or cut off")

    def on_close(self, reason: str) -> None:
        self._watch.end()
        super().on_close(reason)
        if self.has_joined:
            self._host_join.lost(self, reason)


class HostJoin:
    """The hosts of a run, from the start of their agents to their end.

    on_lost(agent, why): called in the connection's thread when an agent that had joined is gone.
    on_joined(agent): called in the connection's thread when an agent has joined a program that runs.
    """

    def __init__(self, options: MultiHostOptions, credentials: Credentials) -> None:
        self._options = options
        self._engine = options.engine
        self.patience = options.patience
        self._credentials = credentials
        self._needs_torch = False
        self._log_dir = ""
        self._agents: dict[str, RemoteAgent] = {}
        self._offers: dict[str, HostOffer] = {}
        self._refusals: list[str] = []
        self._watched: Sequence[StartedAgent] = ()
        self._changed = threading.Condition()
        self._lost: set[str] = set()
        self._is_over = threading.Event()
        self._on_lost: OnLost | None = None
        self._on_joined: OnJoined = lambda agent: None
        self._early_losses: list[tuple[RemoteAgent, str]] = []

    @property
    def offers(self) -> dict[str, HostOffer]:
        return self._offers

    def start_and_wait(self, log_dir: str, needs_torch: bool) -> dict[str, RemoteAgent]:
        """Start the agents and wait for them; by host, in the engine's order.

        Raises:
            LaunchError: an agent could not be started, was refused, or has not joined in time; says which.
        """
        self._needs_torch = needs_torch
        listener, invitation = self._listen_for_agents(log_dir)
        try:
            self._watched = self._engine.start(invitation)
            # Begin now: the first agent to join must not take the launcher for dead while it waits for the last one.
            threading.Thread(target=self._be_alive, name="launcher is alive", daemon=True).start()
            self._wait()
        finally:
            listener.close()  # no agent may join any more
        return {name: self._agents[name] for name in self._offers}

    def tell_of_changes(self, on_lost: OnLost, on_joined: OnJoined) -> None:
        """Call on_lost for each lost host, and on_joined for each that is up: now for earlier changes."""
        with self._changed:
            self._on_lost, self._on_joined = on_lost, on_joined
            early, self._early_losses = self._early_losses, []
            agents = list(self._agents.values())
        for agent, why in early:
            on_lost(agent, why)
        for agent in agents:
            on_joined(agent)

    def release(self, patience_s: float) -> None:
        """The program has ended."""
        self.close(patience_s)

    def close(self, patience_s: float) -> None:
        """Let the agents end, which they do when their connections are closed; kill what has not, after a while."""
        self._is_over.set()
        for agent in list(self._agents.values()):
            agent.connection.close("the run has ended")
        deadline = time.monotonic() + patience_s
        hoped_for = [one for one in self._watched if not self._lost.issuperset(one.hosts)]
        while any(one.how_it_ended() is None for one in hoped_for) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S / 10)
        kill_all(self._watched)
        self._engine.close()

    # These are called in the threads of connections.

    def join(self, agent: RemoteAgent) -> None:
        """Accept the agent, or raise LaunchError."""
        joining = agent.joining
        handshake.check_versions(joining.host, joining.versions, Versions.here(), self._needs_torch)
        with self._changed:
            self._check_is_expected(joining.host)
            if joining.host in self._agents:
                raise LaunchError(f"host {joining.host!r} has an agent already")
            agent.welcome()
            self._agents[joining.host] = agent
            self._lost.discard(joining.host)
            self._changed.notify_all()
            on_joined = self._on_joined
        on_joined(agent)

    def refused(self, why: str) -> None:
        """Keep the reason for which a caller was refused, for the error if hosts are missing."""
        with self._changed:
            self._refusals.append(why)
            self._changed.notify_all()

    def lost(self, agent: RemoteAgent, reason: str) -> None:
        """Report the loss of an agent that had joined, after the end of its connection."""
        if self._is_over.is_set():
            return
        self._lost.add(agent.name)
        why = self._explained(agent.name, reason, is_silent=agent.is_silent)
        with self._changed:
            if self._on_lost is None:
                self._early_losses.append((agent, why))
                self._changed.notify_all()
                return
        self._on_lost(agent, why)

    def _check_is_expected(self, host: str) -> None:
        if host not in self._offers:
            raise LaunchError(f"host {host!r} is not one of this run's: {', '.join(self._offers)}")

    def _listen_for_agents(self, log_dir: str) -> tuple[Listener, Invitation]:
        self._offers = {offer.name: offer for offer in self._engine.hosts()}
        self._log_dir = log_dir
        where = self._where()
        silence_s = (
            2 * self.patience.silence_s
        )  # of the TCP connection; SilenceWatch, which gives a better reason, is to notice first
        try:
            endpoint = f"{tcp_carriers.scheme_of(self._options.carrier)}{where[0]}"
            carrier = tcp_carriers.carrier_of(endpoint)
            listener: Listener = carrier.listen(endpoint, self._accept, self._credentials, silence_s)
        except OSError as error:
            raise LaunchError(self._why_not_there(error) if self._options.listen else str(error)) from error
        port = listener.endpoint.rpartition(":")[2]
        addresses = [f"{bracketed(name)}:{port}" for name in where[1]]
        secret = self._credentials.to_bytes()
        return listener, Invitation(addresses, secret, log_dir, self._options.interface, self._options.carrier)

    def _why_not_there(self, error: OSError) -> str:
        own = ", ".join(addresses_for([])) or "none but its loopback's"
        why = str(getattr(error.__cause__, "strerror", None) or error).partition(" (")[0]
        return (
            f"--listen={self._options.listen}: this host cannot listen there: {why}. It has the addresses {own}; where "
            "the hosts reach it by another one, write --listen=THAT@OWN"
        )

    def _accept(self, connection: Connection) -> None:
        RemoteAgent(connection, self, self.patience.silence_s).start()

    def _where(self) -> tuple[str, list[str]]:
        """Return the address to bind, and the names by which agents may try to reach it."""
        if self._options.listen:
            return f"{self._options.listen}:0", [self._options.listen.partition("@")[0]]
        if self._engine.is_local:
            return "127.0.0.1:0", ["127.0.0.1"]
        found = addresses_for(self._offers)
        if not found:
            raise LaunchError("this host has no address by which others could reach it; say one (listen=, --listen=)")
        anywhere = "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"  # "[::]" accepts IPv4 as well
        return f"{bracketed(found[0])}@{anywhere}:0", found

    def _wait(self) -> None:
        began = time.monotonic()
        deadline = began + self.patience.join_s
        while missing := [name for name in self._offers if name not in self._agents or name in self._lost]:
            concerned = [one for one in self._watched if not set(one.hosts).isdisjoint(missing)]
            ended = [one for one in concerned if one.how_it_ended()]
            if ended or self._refusals:
                deadline = min(deadline, time.monotonic() + _MORE_NEWS_S)
            if time.monotonic() >= deadline or (ended and len(ended) == len(concerned)):
                raise LaunchError(self._hosts_not_joined(missing, time.monotonic() - began))
            with self._changed:
                self._changed.wait(_LOOK_EVERY_S)

    def _hosts_not_joined(self, missing: Sequence[str], waited_s: float) -> str:
        return hosts_not_joined(missing, len(self._offers), self._refusals, self._watched, waited_s, self._log_dir)

    def _explained(self, name: str, reason: str, *, is_silent: bool) -> str:
        watched = next((one for one in self._watched if name in one.hosts), None)
        # Engines report no end of a host that is only silent.
        news_s = watched.LAST_NEWS_S if watched is not None and not is_silent else 0.0
        deadline = time.monotonic() + news_s
        while watched is not None and (how := watched.how_it_ended()) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S / 10)
        ended = f" (its agent ended: {how})" if watched is not None and how else ""
        return f"host {name!r} is lost: {reason}{ended}"

    def _be_alive(self) -> None:
        """Tell the agents one after the other, over a second: hundreds of threads that wake at once are slow."""
        while not self._is_over.is_set():
            agents = list(self._agents.values())
            for agent in agents:
                agent.tell_if_open(Alive())
                if self._is_over.wait(_ALIVE_EVERY_S / len(agents)):
                    return
            if not agents:
                self._is_over.wait(_ALIVE_EVERY_S)


_MOST_TOLD = 3  # hosts of which the error gives a reason, so that it has at most 15 lines
_LINES = 5  # printed lines that are shown of one host; fewer if several hosts are shown
_FEW_LINES = 2


def hosts_not_joined(
    missing: Sequence[str],
    of: int,
    refusals: Sequence[str],
    watched: Sequence[StartedAgent],
    waited_s: float,
    log_dir: str,
) -> str:
    """Return the error's text.

    watched: of all hosts. waited_s: since they were started. log_dir: has all that they print.
    """
    theirs = [one for one in watched if not set(one.hosts).isdisjoint(missing)]
    told = [one for one in theirs if one.how_it_ended() or one.last_lines()]
    told.sort(
        key=lambda one: one.how_it_ended() is None
    )  # an agent that has ended tells more than one that has only printed something
    silent = [name for name in missing if not any(name in one.hosts for one in told)]
    lines = _LINES if len(told) == 1 else _FEW_LINES
    details = [*refusals[:_MOST_TOLD], *(_told(one, waited_s, lines) for one in told[:_MOST_TOLD])]
    if len(told) > _MOST_TOLD:
        details.append(f"and {len(told) - _MOST_TOLD} more that said why: all that they print is in {log_dir}")
    if silent:
        details.append(f"{name_list(silent)}: not there yet after {waited_s:.0f} s, without a word")
    return "\n  ".join([f"{len(missing)} of {of} hosts have not joined: {name_list(missing)}", *details])


def _told(one: StartedAgent, waited_s: float, most_lines: int) -> str:
    how = one.how_it_ended()
    state = f"its agent ended ({how})" if how else f"not there yet after {waited_s:.0f} s"
    lines = one.last_lines()[-most_lines:]
    said = "".join(f"\n      {line}" for line in lines) or "; it had printed nothing"
    return f"{name_list(one.hosts)}: {state}{said}"
