"""The agent of one host: runs nodes there, as process mode does on the launcher's host."""

import contextlib
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from lp_pipe.connections import Connection, Frame, frames, tcp_carriers
from lp_pipe.connections.credentials import Credentials
from lp_pipe.connections.routes import local_address_towards
from lp_pipe.connections.tcp_endpoint import bracketed
from lp_pipe.errors import LaunchError, Unauthenticated, Unavailable
from lp_pipe.launch.coordination.ports import Ports
from lp_pipe.launch.hosts import handshake
from lp_pipe.launch.hosts.agent_messages import (
    Alive,
    CloseNodes,
    KeepContents,
    KillNodes,
    LayOutTree,
    LinesWritten,
    LookAtNodes,
    MissingContents,
    ReadClock,
    RestartNode,
    SeesFile,
    StartNodes,
    StopNodes,
    TakeOverNode,
    TerminateNodes,
)
from lp_pipe.launch.hosts.remote_coordinator import RemoteCoordinator
from lp_pipe.launch.hosts.shipped_logs import ShippedLogs
from lp_pipe.launch.hosts.source_tree import SourceTree
from lp_pipe.launch.hosts.tree_store import TreeStore
from lp_pipe.launch.plan.hardware import this_host
from lp_pipe.launch.process import ProcessHost
from lp_pipe.launch.supervision.lifecycle import LAUNCHER_PATIENCE_S
from lp_pipe.launch.supervision.messages import HostMembership, InjectFault, ReservePort, SetTracing, Stacks
from lp_pipe.launch.supervision.peer import Handlers, Peer
from lp_pipe.protos import supervision_pb2 as wire
from lp_pipe.rpc import codec
from lp_pipe.rpc.daemon_pool import settle

_log = logging.getLogger(__name__)

_ALIVE_EVERY_S = 1.0
_TRY_AGAIN_S = 0.3
_REFUSED_SHARE = 0.1  # share of the patience; the network of a new pod may refuse for a moment


class End(NamedTuple):
    """The reason for which an agent has ended. is_orderly: the launcher ended it when nothing of its nodes was left."""

    reason: str
    is_orderly: bool


def run_agent(
    addresses: Sequence[str],
    credentials: Credentials,
    name: str,
    interface: str = "",
    patience_s: float = 10.0,
    transport: str = "tls",
    parent: int | None = None,
) -> "End":
    """Join the launcher at one of `addresses` ("HOST:PORT"), run nodes for it until the end.

    interface: the address by which other hosts reach this one; "": that from which the launcher was reached.
    transport: see Invitation. parent: the process without which this agent is of no use; None: there is none such.

    Raises:
        LaunchError: no launcher was reached within `patience_s`, or all addresses have refused for a tenth of that, or
            the parent has ended, or the launcher does not take this agent.
    """
    scheme = tcp_carriers.scheme_of(transport)
    connection, launcher = _connect(scheme, addresses, credentials, patience_s, parent)
    address = interface or local_address_towards(launcher.rpartition(":")[0].strip("[]"))
    agent = Agent(connection, credentials, name, address, scheme)
    return agent.serve()


class Agent:
    """The part of a run that is on one host: its nodes run for as long as the launcher is there.

    scheme: of the endpoints at which its nodes serve other hosts.
    tree: where the sources are laid out that the launcher has sent; "": nowhere.
    """

    def __init__(self, connection: Connection, credentials: Credentials, name: str, address: str, scheme: str) -> None:
        self._launcher = Peer(connection, self._handlers(), codec)
        self._connection = connection
        self._credentials = credentials
        self.name = name
        self.address = address
        self._scheme = scheme
        self.tree = ""
        self.logs = ShippedLogs(self._launcher)
        self._ports = Ports(address)
        self._trees = TreeStore()
        self.coordinator: RemoteCoordinator | None = None
        self.host: ProcessHost | None = None
        self._is_welcome = False
        self._is_traced = False
        self._is_closed = False
        self._closed_reason = ""
        self._is_over = threading.Event()

    def serve(self) -> End:
        """Serve until the launcher closes the link, or is gone; then the nodes end because this process does."""
        versions, hardware = handshake.Versions.here(), this_host()
        joining = handshake.Joining(self.name, self.address, os.getpid(), versions, hardware)
        self._connection.start(self._on_frame, self._on_close)
        try:
            self._connection.send(Frame(frames.SUPERVISION, name=handshake.JOIN, body=joining.to_bytes()))
        except Unavailable:
            self._is_over.wait(_ALIVE_EVERY_S)
        while not self._is_over.wait(_ALIVE_EVERY_S):
            coordinator = self.coordinator
            if coordinator is None or not coordinator.report_calls():
                self._launcher.tell_if_open(Alive())
        if not self._is_welcome:
            raise LaunchError(f"the launcher does not take this agent: {self._closed_reason}")
        return End(self._closed_reason, self._is_closed)

    def _handlers(self) -> Handlers:
        """Return the handlers of the launcher's messages; what takes time has a thread of its own."""
        on = (handlers := Handlers()).on
        on(Alive, lambda message: None)  # its arrival is all that counts
        on(StartNodes, lambda message: _in_thread("start nodes", lambda: self._start(message)))
        on(CloseNodes, lambda message: _in_thread("close", self._close))
        on(RestartNode, lambda message: self._restart(message.node_id, lambda host: host.restart(message.node_id)))
        on(
            TakeOverNode,
            lambda message: self._restart(
                message.spec.node_id, lambda host: host.take_over(message.spec, message.payload, message.place)
            ),
        )
        on(StopNodes, lambda message: self._stop_nodes(message.node_ids))
        on(TerminateNodes, lambda message: self._started_host.terminate(message.node_ids))
        on(KillNodes, lambda message: self._started_host.kill(message.node_ids))
        on(Stacks, lambda message: _in_thread("stacks", self._started_host.stacks))
        on(LookAtNodes, lambda message: self._started_host.look(message.old_s))
        on(SetTracing, lambda message: self._set_tracing(message.is_on))
        on(ReadClock, lambda message: time.monotonic())
        on(InjectFault, lambda message: self._inject(wire.Fault.FromString(message.fault)))
        on(MissingContents, lambda message: _in_thread("sources", lambda: self._trees.missing_contents(message.tree)))
        on(KeepContents, lambda message: _in_thread("sources", lambda: self._trees.take(message.contents)))
        on(LayOutTree, lambda message: _in_thread("sources", lambda: self._lay_out(message.tree)))
        on(SeesFile, lambda message: os.path.exists(message.path))
        on(ReservePort, lambda message: self._ports.reserve(message.address))
        on(LinesWritten, lambda message: self.logs.written(message.size))
        return handlers

    def _start(self, assignment: StartNodes) -> str:
        self._is_closed = False
        self.logs = ShippedLogs(self._launcher)  # the logs of an earlier program are closed
        self.coordinator = RemoteCoordinator(self._launcher, assignment.payloads)
        self.host = ProcessHost(
            assignment.plan(_usable(Path(assignment.run_dir))),
            self.coordinator,
            dict(assignment.payloads),
            dict(assignment.places),
            surroundings=assignment.surroundings.on_this_host(self.tree),
            log_output=self.logs,
            membership=HostMembership(
                run=assignment.run,
                host=f"{self.name}/{os.getpid()}",
                reached_at=f"{self._scheme}{bracketed(self.address)}",
                credentials=self._credentials.to_bytes(),
                silence_s=assignment.silence_s,
            ),
            preload=assignment.preload,
            orphan_s=assignment.orphan_s,
        )
        self.host.set_tracing(self._is_traced)
        self.host.start()
        return self.host.mark

    def _close(self) -> dict[str, int]:
        host, self.host, self.coordinator = self.host, None, None
        if host is not None:
            host.close()
        self._is_closed = True
        return dict(host.past_hits) if host is not None else {}

    def _restart(self, node_id: str, start: Callable[[ProcessHost], None]) -> "Future[None]":
        host = self._started_host
        assert self.coordinator is not None
        self.coordinator.starts_again(node_id)
        return _in_thread(f"restart {node_id}", lambda: start(host))

    def _stop_nodes(self, node_ids: list[str]) -> None:
        if self.coordinator is not None:
            self.coordinator.told_to_end(node_ids)
            self._started_host.stop_nodes(node_ids)

    def _inject(self, fault: wire.Fault) -> "Future[int]":
        asked = self._started_host.inject(fault)
        return _in_thread("fault", lambda: sum(answer.result() for answer in asked.values()))

    def _set_tracing(self, is_on: bool) -> None:
        self._is_traced = is_on
        if self.host is not None:
            self.host.set_tracing(is_on)

    def _lay_out(self, tree: SourceTree) -> None:
        self.tree = self._trees.lay_out(tree)

    @property
    def _started_host(self) -> ProcessHost:
        if self.host is None:
            raise LaunchError(f"the agent of host {self.name} has not started any node")
        return self.host

    def _on_frame(self, frame: Frame) -> None:
        if self._is_welcome:
            self._launcher.on_frame(frame)
        elif frame.name == handshake.WELCOME:
            self._is_welcome = True

    def _on_close(self, reason: str) -> None:
        self._closed_reason = reason
        self.logs.close()
        self._launcher.on_close(reason)
        self._is_over.set()


def _connect(
    scheme: str, addresses: Sequence[str], credentials: Credentials, patience_s: float, parent: int | None
) -> tuple[Connection, str]:
    """Connect to the first address that answers: this host may not reach all addresses of the launcher's."""
    carrier = tcp_carriers.carrier_of(scheme)
    began = not_refused_at = time.monotonic()  # where all addresses refuse, no launcher listens any more
    errors: dict[str, str] = {}
    while time.monotonic() < min(began + patience_s, not_refused_at + _REFUSED_SHARE * patience_s):
        if parent not in (None, os.getppid()):
            raise LaunchError(f"host {socket.gethostname()}: process {parent}, which has started this agent, has ended")
        for address in addresses:
            try:
                return carrier.connect(f"{scheme}{address}", LAUNCHER_PATIENCE_S, credentials), address
            except Unauthenticated as error:
                raise LaunchError(f"host {socket.gethostname()}: {error}") from error
            except Unavailable as error:
                errors[address] = str(error)
                if not isinstance(error.__cause__, ConnectionRefusedError):
                    not_refused_at = time.monotonic()
        time.sleep(_TRY_AGAIN_S)
    raise LaunchError(
        f"host {socket.gethostname()} cannot reach the launcher: " + "; ".join(errors.values()) + "; is there a "
        "firewall, or does the launcher listen at an address that this host does not know (--listen)?"
    )


def _usable(run_dir: Path) -> Path:
    """The run's folder, where this host can have one of that name for this user; else one of its own."""
    with contextlib.suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
    if os.access(run_dir, os.W_OK | os.X_OK):
        return run_dir
    return Path(tempfile.mkdtemp(prefix="lp_pipe-run-"))


def _in_thread(name: str, work: Callable[[], Any]) -> "Future[Any]":
    """Run the work in a thread of its own, so that the link does not wait for it."""
    done: Future[Any] = Future()
    threading.Thread(target=settle, args=(done, work), name=name, daemon=True).start()
    return done
