"""The hosts of a program, and which of them each of its nodes is to run on."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from lp_pipe.connections import tcp_carriers
from lp_pipe.connections.credentials import Credentials
from lp_pipe.launch.engines import Engine
from lp_pipe.launch.hosts.edges import check_channels
from lp_pipe.launch.hosts.host_join import HostJoin, Patience, RemoteAgent
from lp_pipe.launch.hosts.source_tree import SourceTree
from lp_pipe.launch.options import LaunchOptions
from lp_pipe.launch.plan.hardware import Hardware
from lp_pipe.launch.plan.host_placement import HostPlacement, offered, place_on_hosts
from lp_pipe.launch.plan.launch_plan import LaunchPlan


@dataclass(frozen=True)
class KeptHosts:
    """Hosts that have joined before, and outlive the program: it runs on the first `used`, the others are spares."""

    host_join: HostJoin
    credentials: Credentials
    agents: Mapping[str, RemoteAgent]
    used: int


@dataclass(frozen=True)
class MultiHostOptions:
    """listen: by which address the hosts reach the launcher, interface: by which each other; "": found out.

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


@dataclass(frozen=True)
class JoinedHosts:
    """The hosts of a run are there, and it is decided what goes where; nothing of the program runs.

    is_elastic: with one host less it is another program that runs.
    """

    host_join: HostJoin
    agents: Mapping[str, RemoteAgent]
    hardware: Mapping[str, Hardware]
    places: Mapping[str, HostPlacement]
    is_elastic: bool = False


def join_hosts(plan: LaunchPlan, options: MultiHostOptions, credentials: Credentials) -> JoinedHosts:
    """Start the agents, unless they are there, and place the nodes on their hosts.

    Raises:
        LaunchError: a host has not joined. ValueError: the hosts do not have what the program wants.
    """
    if options.kept is not None:
        return _join_kept(plan, options, options.kept)
    host_join = HostJoin(
        options.engine, credentials, options.listen, options.interface, options.patience, options.carrier
    )
    try:
        agents = host_join.start_and_wait(str(plan.folder.agents), needs_torch="torch" in sys.modules)
        hardware = _hardware_of(agents, host_join)
        return JoinedHosts(host_join, agents, hardware, _places(plan, hardware, options.carrier))
    except BaseException:  # also Ctrl+C
        host_join.close(patience_s=1.0)
        raise


def _join_kept(plan: LaunchPlan, options: MultiHostOptions, kept: KeptHosts) -> JoinedHosts:
    hardware = _hardware_of(kept.agents, kept.host_join)
    used = dict(list(hardware.items())[: kept.used])
    return JoinedHosts(kept.host_join, kept.agents, hardware, _places(plan, used, options.carrier), is_elastic=True)


def _places(plan: LaunchPlan, hardware: Mapping[str, Hardware], transport: str) -> dict[str, HostPlacement]:
    found = place_on_hosts(plan.nodes, hardware)
    check_channels(plan.edges, found, transport)
    return found


def _hardware_of(agents: Mapping[str, RemoteAgent], host_join: HostJoin) -> dict[str, Hardware]:
    return {name: offered(host_join.offers[name], agent.joining.hardware) for name, agent in agents.items()}
