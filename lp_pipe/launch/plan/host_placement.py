"""On which of several hosts each node runs; refuses what they do not have together, before anything starts.

A group's nodes go over the hosts in order, in blocks: neighbours (the stages of a pipeline) share a host wherever they
can, and a group uses all hosts, unless its `Resources` or a plan say otherwise. Groups take what they want in the
order of the program, each behind the group on whose hosts it goes.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from lp_pipe.launch.engines.base import HostOffer
from lp_pipe.launch.plan.hardware import Hardware
from lp_pipe.launch.plan.host_capacity import HostCapacity, check_fit, shared_out, take_planned
from lp_pipe.launch.plan.placement import Placement, place_all
from lp_pipe.launch.plan.spec import NodeSpec


@dataclass(frozen=True)
class HostPlacement:
    """Where a node runs."""

    host: str
    place: Placement


def offered(offer: HostOffer, found: Hardware) -> Hardware:
    """What of a host may be used: what its agent has found, within the limits of the offer.

    Raises:
        ValueError: the offer has more than there is.
    """
    gpus, cpus = found.gpus, found.cpus
    if offer.gpus is not None and offer.gpus > len(gpus):
        raise ValueError(f"host {offer.name!r} is said to have {offer.gpus} GPUs, but its agent has found {len(gpus)}")
    memory = found.memory_bytes if offer.memory is None else min(offer.memory, found.memory_bytes)
    labels = found.labels | offer.labels
    return Hardware(found.names | {offer.name}, cpus[: offer.cpus], memory, gpus[: offer.gpus], labels)


def place_on_hosts(nodes: Sequence[NodeSpec], hosts: Mapping[str, Hardware]) -> dict[str, HostPlacement]:
    """The host and place of every process, by node_id; those of one node of the program share them.

    Raises:
        ValueError: a group wants more than all hosts together have left, or a host that is not there.
    """
    return _places(nodes, hosts, _hosts_of(nodes, _capacities(hosts), planned=planned_hosts(nodes, hosts)), {})


def place_again(
    nodes: Sequence[NodeSpec],
    hosts: Mapping[str, Hardware],
    staying: Sequence[NodeSpec],
    places: Mapping[str, HostPlacement],
    only_spares: bool = False,
) -> dict[str, HostPlacement]:
    """New places for the nodes of a host that is lost, beside those that stay where `places` says.

    A host without nodes, a spare, takes all of them if it can; else (unless `only_spares`) they go where there is room,
    as at the start, but wherever a plan had them.

    Raises:
        ValueError: the hosts that are left do not have what a group wants.
    """
    if not hosts:
        raise ValueError("no host is left")
    missing = ValueError("no host is without nodes")
    taken = {spec.node_id: places[spec.node_id] for spec in staying}
    for candidates in _candidates(hosts, taken, only_spares):
        capacities = _capacities(candidates)
        for spec in {spec.name: spec for spec in staying}.values():
            if taken[spec.node_id].host in capacities:
                capacities[taken[spec.node_id].host].take(spec)
        try:
            host_of = _hosts_of(nodes, capacities, staying, taken)
        except ValueError as error:
            missing = error
        else:
            return _places(nodes, hosts, host_of, taken)
    raise missing


def _candidates(
    hosts: Mapping[str, Hardware], taken: Mapping[str, HostPlacement], only_spares: bool
) -> Iterator[Mapping[str, Hardware]]:
    """Each spare by itself, then all hosts."""
    in_use = {found.host for found in taken.values()}
    yield from ({name: hardware} for name, hardware in hosts.items() if name not in in_use)
    if not only_spares:
        yield hosts


def _capacities(hosts: Mapping[str, Hardware]) -> dict[str, HostCapacity]:
    return {name: HostCapacity(hardware, len(hardware.gpus), hardware.memory_bytes) for name, hardware in hosts.items()}


def _hosts_of(
    nodes: Sequence[NodeSpec],
    capacities: Mapping[str, HostCapacity],
    staying: Sequence[NodeSpec] = (),
    taken: Mapping[str, HostPlacement] = MappingProxyType({}),
    planned: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """By the name of the node of the program; takes the room.

    taken: the places of those that stay, by node_id. planned: the hosts that a plan names.
    """
    groups: dict[str, dict[str, NodeSpec]] = {}
    for spec in nodes:
        groups.setdefault(spec.label, {}).setdefault(spec.name, spec)
    sizes = {spec.label: spec.group_size for spec in (*nodes, *staying)}
    host_of = {spec.name: taken[spec.node_id].host for spec in staying}
    for label in _bases_first(groups):
        specs = list(groups[label].values())
        base = _base_of(specs)
        beside = {
            spec.name: host
            for spec in specs
            if (host := host_of.get(f"{base}/{spec.index * sizes.get(base, 0) // spec.group_size}")) is not None
        }
        tied = [spec for spec in specs if spec.name in beside]
        check_fit(label, tied, capacities, list(beside.values()), base)
        for spec in tied:
            capacities[beside[spec.name]].take(spec)
        for spec in specs:
            if spec.name in planned:
                take_planned(spec, planned[spec.name], capacities)
                beside[spec.name] = planned[spec.name]
        free = [spec for spec in specs if spec.name not in beside]  # also those whose base does not run any more
        for spec, host in zip(free, shared_out(label, free, capacities) if free else [], strict=True):
            capacities[host].take(spec)
            beside[spec.name] = host
        host_of.update(beside)
    return host_of


def _bases_first(groups: Mapping[str, Mapping[str, NodeSpec]]) -> list[str]:
    """The labels, each behind that of the group on whose hosts it goes; there is no ring of them."""
    ordered: list[str] = []
    for label in groups:
        chain = [label]
        while (base := _base_of(groups[chain[-1]].values())) in groups:
            chain.append(base)
        ordered += [one for one in reversed(chain) if one not in ordered]
    return ordered


def _base_of(group: Iterable[NodeSpec]) -> str:
    """The label of the group on whose hosts it goes; "" for most."""
    return next(iter(group)).resources.colocate_with or ""


def _places(
    nodes: Sequence[NodeSpec],
    hosts: Mapping[str, Hardware],
    host_of: Mapping[str, str],
    taken: Mapping[str, HostPlacement],
) -> dict[str, HostPlacement]:
    found: dict[str, HostPlacement] = {}
    here: dict[str, list[NodeSpec]] = {name: [] for name in hosts}
    for spec in nodes:
        anywhere = dataclasses.replace(spec, resources=dataclasses.replace(spec.resources, host=None))
        here[host_of[spec.name]].append(anywhere)
    for name, hardware in hosts.items():
        beside = [other.place for other in taken.values() if other.host == name]
        new = place_all(here[name], hardware, beside)
        found.update({node_id: HostPlacement(name, place) for node_id, place in new.items()})
    return {spec.node_id: found[spec.node_id] for spec in nodes}


def planned_hosts(nodes: Sequence[NodeSpec], hosts: Mapping[str, Hardware]) -> dict[str, str]:
    """By the name of the node of the program; not of those for which nobody has planned any.

    What a group's `Resources` say of where its nodes go comes first.

    Raises:
        ValueError: a host is not there; names all such, and who was to run there.
    """
    found: dict[str, str] = {}
    missing: dict[int | str, list[str]] = {}
    for spec in nodes:
        wanted = spec.node.planned_host
        if wanted is None or spec.resources.says_where:
            continue
        host = _host(wanted, hosts)
        if host is None:
            missing.setdefault(wanted, []).append(spec.name)
        else:
            found[spec.name] = host
    if missing:
        told = "; ".join(f"host {wanted!r} for {', '.join(names)}" for wanted, names in missing.items())
        there = ", ".join(f"{place}: {name}" for place, name in enumerate(hosts))
        raise ValueError(
            f"the plan names hosts that are not there: {told}. There are {there}: add them, or edit the plan"
        )
    return found


def _host(wanted: int | str, hosts: Mapping[str, Hardware]) -> str | None:
    if isinstance(wanted, int):
        return list(hosts)[wanted] if wanted < len(hosts) else None
    return next((name for name, hardware in hosts.items() if wanted in hardware.names), None)
