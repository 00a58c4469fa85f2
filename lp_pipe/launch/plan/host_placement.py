"""Choose the host of each node. What all hosts together lack is an error before anything starts.

A group's nodes go over the hosts in order, in blocks. So neighbours (the stages of a pipeline) share a host wherever
possible, and a group uses all hosts, unless its `Resources` or a plan say otherwise. Groups are placed in the order of
the program, but a group that is colocated with another one after that one.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from lp_pipe.launch.engines.base import HostOffer
from lp_pipe.launch.plan.hardware import Hardware
from lp_pipe.launch.plan.placement import Placement, place_all, place_with_room
from lp_pipe.launch.plan.spec import NodeSpec

_GIB = 1 << 30
_MANY = 1 << 30  # count for nodes that need nothing that could run out


@dataclass
class HostCapacity:
    """The remaining capacity of a host, and the nodes placed on it."""

    hardware: Hardware
    gpus: int
    memory: int
    nodes: list[NodeSpec] = field(default_factory=list)

    def count(self, spec: NodeSpec) -> int:
        """Return how many nodes like this one fit."""
        asked = spec.resources
        if not self.is_asked_for(spec) or (asked.cpus is not None and asked.cpus > len(self.hardware.cpus)):
            return 0
        limits = [_MANY]
        limits += [self.gpus // asked.gpus] if asked.gpus else []
        limits += [self.memory // asked.memory] if asked.memory else []
        if asked.placement == "spread":
            limits.append(0 if any(other.label == spec.label for other in self.nodes) else 1)
        return min(limits)

    def is_asked_for(self, spec: NodeSpec) -> bool:
        """Return whether the host has the name and the labels that the node wants."""
        asked = spec.resources
        is_named = asked.host is None or asked.host in self.hardware.names
        return is_named and self.hardware.labels.issuperset(asked.host_labels)

    def take(self, spec: NodeSpec) -> None:
        self.gpus -= spec.resources.gpus
        self.memory -= spec.resources.memory or 0
        self.nodes.append(spec)


def choose_hosts(label: str, specs: Sequence[NodeSpec], capacities: Mapping[str, HostCapacity]) -> list[str]:
    """Return the host of each node of a group, in the order of the hosts. Takes no capacity yet.

    Raises:
        ValueError: they do not fit; the message says what is missing.
    """
    spec, wanted = specs[0], len(specs)
    room = {name: one.count(spec) for name, one in capacities.items()}
    if sum(room.values()) < wanted:
        raise ValueError(_what_is_missing(label, spec, sum(room.values()), wanted, capacities))
    if spec.resources.placement == "pack":
        shares = _packed(room, wanted)
    elif wanted == 1 or spec.resources.placement == "spread":  # where the fewest other nodes are
        fewest_first = sorted((name for name in capacities if room[name]), key=lambda name: len(capacities[name].nodes))
        shares = dict.fromkeys(fewest_first[:wanted], 1)
    else:
        shares = _even(room, wanted)
    return [name for name in capacities for _ in range(shares.get(name, 0))]


def check_fit(
    label: str, specs: Sequence[NodeSpec], capacities: Mapping[str, HostCapacity], chosen: Sequence[str], to: str
) -> None:
    """Check that a group's nodes have room on the hosts of the group `to`.

    Raises:
        ValueError: they do not fit there.
    """
    for name, wanted in Counter(chosen).items():
        must = f"group {label!r} must go where group {to!r} is: {wanted} nodes to host {name!r}"
        if name not in capacities:
            raise ValueError(f"{must}, which is not one of {', '.join(capacities)}")
        fitting = capacities[name].count(specs[0])
        if fitting < wanted:
            raise ValueError(f"{_what_is_missing(label, specs[0], fitting, wanted, {name: capacities[name]})} ({must})")


def take_planned(spec: NodeSpec, host: str, capacities: Mapping[str, HostCapacity]) -> None:
    """Take the capacity for a node on the host that a plan names for it.

    Raises:
        ValueError: the host has no room for it.
    """
    if not capacities[host].count(spec):
        missing = _what_is_missing(spec.label, spec, 0, 1, {host: capacities[host]})
        raise ValueError(f"{missing} (the plan names host {host!r} for {spec.name})")
    capacities[host].take(spec)


def _packed(room: Mapping[str, int], wanted: int) -> dict[str, int]:
    """Use as few hosts as possible: those with the most room first, last the smallest that holds what remains."""
    shares: dict[str, int] = {}
    while wanted:
        free = {name: count for name, count in room.items() if name not in shares}
        enough = [name for name in free if free[name] >= wanted]
        name = min(enough, key=lambda one: free[one]) if enough else max(free, key=lambda one: free[one])
        shares[name] = min(free[name], wanted)
        wanted -= shares[name]
    return shares


def _even(room: Mapping[str, int], wanted: int) -> dict[str, int]:
    """Spread the nodes over all hosts, as evenly as their room allows."""
    shares = dict.fromkeys(room, 0)
    while wanted:
        open_hosts = [name for name in room if shares[name] < room[name]]
        even = max(1, wanted // len(open_hosts))
        for name in open_hosts:
            more = min(even, room[name] - shares[name], wanted)
            shares[name] += more
            wanted -= more
    return shares


def _what_is_missing(
    label: str, spec: NodeSpec, fitting: int, wanted: int, capacities: Mapping[str, HostCapacity]
) -> str:
    asked = spec.resources
    if asked.host is not None and not any(asked.host in room.hardware.names for room in capacities.values()):
        return f"group {label!r} must run on host {asked.host!r}, which is not one of {', '.join(capacities)}"
    if not any(room.is_asked_for(spec) for room in capacities.values()):
        labels = "; ".join(
            f"{name}: {', '.join(sorted(room.hardware.labels)) or 'none'}" for name, room in capacities.items()
        )
        needed = " and ".join(map(repr, asked.host_labels))
        where = f"host {asked.host!r}, if it is" if asked.host is not None else "a host that is"
        return f"group {label!r} must run on {where} labelled {needed}, but the hosts' labels are {labels}"
    wants = [
        *([f"{asked.gpus} GPUs"] if asked.gpus else []),
        *([f"{asked.memory / _GIB:.1f} GiB of memory"] if asked.memory else []),
        *([f"{asked.cpus} cores"] if asked.cpus else []),
        *(["a host of its own"] if asked.placement == "spread" else []),
    ]
    where = f" on host {asked.host!r}" if asked.host is not None else ""
    where += f" labelled {', '.join(asked.host_labels)}" if asked.host_labels else ""
    left = "; ".join(
        f"{name}: {room.gpus} of {len(room.hardware.gpus)} GPUs, {room.memory / _GIB:.1f} GiB, "
        f"{len(room.hardware.cpus)} cores"
        for name, room in capacities.items()
    )
    return (
        f"group {label!r} wants {' and '.join(wants)}{where} for each of its {wanted} nodes, but only {fitting} of "
        f"them fit after the groups before it. The hosts have left: {left}"
    )


@dataclass(frozen=True)
class HostPlacement:
    """The host of a node, and its cores and GPUs there."""

    host: str
    place: Placement


def offered(offer: HostOffer, found: Hardware) -> Hardware:
    """Return what the run may use of a host: what its agent has found, within the limits of the offer.

    Raises:
        ValueError: the offer has more GPUs than the host.
    """
    gpus, cpus = found.gpus, found.cpus
    if offer.gpus is not None and offer.gpus > len(gpus):
        raise ValueError(
            f"host {offer.name!r}: hosts= says gpus={offer.gpus}, but its agent has found {len(gpus)}: correct hosts="
        )
    memory = found.memory_bytes if offer.memory is None else min(offer.memory, found.memory_bytes)
    labels = found.labels | offer.labels
    return Hardware(found.names | {offer.name}, cpus[: offer.cpus], memory, gpus[: offer.gpus], labels)


def place_on_hosts(nodes: Sequence[NodeSpec], hosts: Mapping[str, Hardware]) -> dict[str, HostPlacement]:
    """Return the host and placement of every process, by node_id. The processes of one node share them.

    Nodes that have no room and may wait for it are left out.

    Raises:
        ValueError: a group wants more than all hosts together have left, or a host that is not in the run.
    """

    def place(some: Sequence[NodeSpec]) -> dict[str, HostPlacement]:
        return _places(some, hosts, _hosts_of(some, _capacities(hosts), planned=planned_hosts(some, hosts)), {})

    return place_with_room(nodes, lambda spec: spec.may_wait, place)


def place_late(
    nodes: Sequence[NodeSpec],
    name: str,
    hardware: Hardware,
    staying: Sequence[NodeSpec],
    places: Mapping[str, HostPlacement],
) -> dict[str, HostPlacement]:
    """Return the placements of as many of the nodes as have room on a host that has joined late.

    staying, places: as for `place_again`.
    """

    def place(some: Sequence[NodeSpec]) -> dict[str, HostPlacement]:
        return place_again(some, {name: hardware}, staying, places) if some else {}

    return place_with_room(nodes, lambda spec: True, place)


def place_again(
    nodes: Sequence[NodeSpec],
    hosts: Mapping[str, Hardware],
    staying: Sequence[NodeSpec],
    places: Mapping[str, HostPlacement],
    only_spares: bool = False,
) -> dict[str, HostPlacement]:
    """Return new placements for the nodes of a lost host. The nodes in `staying` keep theirs, which are in `places`.

    If a spare (a host without nodes) has room for all of them, it gets them. Otherwise, unless `only_spares`, they go
    wherever there is room, as at the start, regardless of a plan.

    Raises:
        ValueError: the remaining hosts do not have what a group wants.
    """
    if not hosts:
        raise ValueError("no host is left to place the nodes on")
    missing = ValueError("there is no spare host: every host has nodes")
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
    """Yield each spare host by itself, then all hosts."""
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
    """Return the host of each node, by the node's name, and take the capacity there.

    taken: the placements of the nodes in `staying`, by node_id. planned: the hosts that a plan names.
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
        free = [spec for spec in specs if spec.name not in beside]  # also if the base group no longer runs
        for spec, host in zip(free, choose_hosts(label, free, capacities) if free else [], strict=True):
            capacities[host].take(spec)
            beside[spec.name] = host
        host_of.update(beside)
    return host_of


def _bases_first(groups: Mapping[str, Mapping[str, NodeSpec]]) -> list[str]:
    """Return the labels, each after that of the group it is colocated with. `make_plan` has ruled out rings."""
    ordered: list[str] = []
    for label in groups:
        chain = [label]
        while (base := _base_of(groups[chain[-1]].values())) in groups:
            chain.append(base)
        ordered += [one for one in reversed(chain) if one not in ordered]
    return ordered


def _base_of(group: Iterable[NodeSpec]) -> str:
    """Return the label of the group that this group is colocated with; "" for most groups."""
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
    """Return the hosts that a plan names, by the node's name.

    Nodes without a planned host are left out, and those of groups that say in `Resources` where they go.

    Raises:
        ValueError: planned hosts are not in the run; the message names them and their nodes.
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
            f"the plan names hosts that the run does not have: {told}. The run has {there}: add hosts, or edit the plan"
        )
    return found


def _host(wanted: int | str, hosts: Mapping[str, Hardware]) -> str | None:
    if isinstance(wanted, int):
        return list(hosts)[wanted] if wanted < len(hosts) else None
    return next((name for name, hardware in hosts.items() if wanted in hardware.names), None)
