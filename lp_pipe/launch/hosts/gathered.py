"""The hosts of a program, and which of them each of its nodes is to run on."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from lp_pipe.connections import tcp_carriers
from lp_pipe.connections.credentials import Credentials
from lp_pipe.launch.engines import Engine
from lp_pipe.launch.hosts.edges import check_channels
from lp_pipe.launch.hosts.gathering import Gathering, Patience, RemoteAgent
from lp_pipe.launch.hosts.source_tree import SourceTree
from lp_pipe.launch.plan.hardware import Hardware
from lp_pipe.launch.plan.host_placement import HostPlacement, offered, place_on_hosts
from lp_pipe.launch.plan.launch_plan import LaunchPlan


@dataclass(frozen=True)
class Kept:
    """Hosts that have joined before, and outlive the program: it runs on the first `used`, the others are spares."""

    gathering: Gathering
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
    kept: Kept | None = None
    transport: str = "auto"

    def __post_init__(self) -> None:
        tcp_carriers.scheme_of(self.transport)

    @property
    def carrier(self) -> str:
        """The transport's name, where "auto" is the default one."""
        return "tls" if self.transport == "auto" else self.transport


@dataclass(frozen=True)
class Gathered:
    """The hosts of a run are there, and it is decided what goes where; nothing of the program runs.

    is_elastic: with one host less it is another program that runs.
    """

    gathering: Gathering
    agents: Mapping[str, RemoteAgent]
    hardware: Mapping[str, Hardware]
    places: Mapping[str, HostPlacement]
    is_elastic: bool = False


def gather(plan: LaunchPlan, options: MultiHostOptions, credentials: Credentials) -> Gathered:
    """Start the agents, unless they are there, and place the nodes on their hosts.

    Raises:
        LaunchError: a host has not joined. ValueError: the hosts do not have what the program wants.
    """
    if options.kept is not None:
        return _gather_kept(plan, options, options.kept)
    gathering = Gathering(
        options.engine, credentials, options.listen, options.interface, options.patience, options.carrier
    )
    try:
        agents = gathering.gather(str(plan.folder.agents), needs_torch="torch" in sys.modules)
        hardware = _hardware_of(agents, gathering)
        return Gathered(gathering, agents, hardware, _places(plan, hardware, options.carrier))
    except BaseException:  # also Ctrl+C
        gathering.close(patience_s=1.0)
        raise


def _gather_kept(plan: LaunchPlan, options: MultiHostOptions, kept: Kept) -> Gathered:
    hardware = _hardware_of(kept.agents, kept.gathering)
    used = dict(list(hardware.items())[: kept.used])
    return Gathered(kept.gathering, kept.agents, hardware, _places(plan, used, options.carrier), is_elastic=True)


def _places(plan: LaunchPlan, hardware: Mapping[str, Hardware], transport: str) -> dict[str, HostPlacement]:
    found = place_on_hosts(plan.nodes, hardware)
    check_channels(plan.edges, found, transport)
    return found


def _hardware_of(agents: Mapping[str, RemoteAgent], gathering: Gathering) -> dict[str, Hardware]:
    return {name: offered(gathering.offers[name], agent.joining.hardware) for name, agent in agents.items()}
