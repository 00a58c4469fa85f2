"""The hosts of a program, and which of them each of its nodes is to run on."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from lp_pipe.connections.credentials import Credentials
from lp_pipe.errors import LaunchError
from lp_pipe.launch.hosts.edges import check_channels
from lp_pipe.launch.hosts.elastic_hosts import ElasticHosts
from lp_pipe.launch.hosts.host_join import HostJoin, KeptHosts, MultiHostOptions, RemoteAgent
from lp_pipe.launch.plan.hardware import Hardware
from lp_pipe.launch.plan.host_placement import HostPlacement, offered, place_on_hosts
from lp_pipe.launch.plan.launch_plan import LaunchPlan


@dataclass(frozen=True)
class JoinedHosts:
    """The hosts of a run are there, and it is decided what goes where; nothing of the program runs.

    places: of the nodes that have room. is_elastic: with one host less it is another program that runs.
    """

    host_join: HostJoin
    agents: Mapping[str, RemoteAgent]
    hardware: Mapping[str, Hardware]
    places: Mapping[str, HostPlacement]
    is_elastic: bool = False


def join_hosts(plan: LaunchPlan, options: MultiHostOptions, credentials: Credentials) -> JoinedHosts:
    """Start the agents, unless they are there, and place the nodes on their hosts.

    Raises:
        LaunchError: a host has not joined; where nodes may wait for room: none has, or too few.
        ValueError: the hosts do not have what the program wants.
    """
    if options.kept is not None:
        return _join_kept(plan, options, options.kept)
    may_wait = any(spec.least_started for spec in plan.nodes)
    host_join = (
        ElasticHosts(options, credentials, is_for_programs=False) if may_wait else HostJoin(options, credentials)
    )
    try:
        agents = host_join.start_and_wait(str(plan.folder.agents), needs_torch="torch" in sys.modules)
        hardware = _hardware_of(agents, host_join)
        try:
            return JoinedHosts(host_join, agents, hardware, _places(plan, hardware, options.carrier))
        except ValueError as error:
            if missing := ", ".join(host_join.offers.keys() - agents.keys()):
                raise LaunchError(f"hosts have not joined: {missing}; without them {error}") from error
            raise
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
