"""On which of several hosts each node runs; refuses what they do not have together, before anything starts.

A group's nodes go over the hosts in order, in blocks: neighbours (the stages of a pipeline) share a host wherever they
can, and a group uses all hosts.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lp_pipe.launch.engines.base import HostOffer
from lp_pipe.launch.hardware import Hardware
from lp_pipe.launch.placement import Place, place_all
from lp_pipe.launch.spec import NodeSpec

_GIB = 1 << 30


@dataclass(frozen=True)
class HostPlace:
    """Where a node runs."""

    host: str
    place: Place


@dataclass
class _Room:
    """What is left of a host."""

    hardware: Hardware
    gpus: int
    memory: int
    nodes: list[NodeSpec] = field(default_factory=list)

    def count(self, spec: NodeSpec, wanted: int) -> int:
        """How many of `wanted` such nodes fit."""
        asked = spec.resources
        if asked.host is not None and asked.host not in self.hardware.names:
            return 0
        if asked.cpus is not None and asked.cpus > len(self.hardware.cpus):
            return 0
        limits = [wanted]
        limits += [self.gpus // asked.gpus] if asked.gpus else []
        limits += [self.memory // asked.memory] if asked.memory else []
        return min(limits)

    def take(self, spec: NodeSpec) -> None:
        self.gpus -= spec.resources.gpus
        self.memory -= spec.resources.memory or 0
        self.nodes.append(spec)


def offered(offer: HostOffer, found: Hardware) -> Hardware:
    """What of a host may be used: what its agent has found, within the limits of the offer.

    Raises:
        ValueError: the offer has more than there is.
    """
    gpus, cpus = found.gpus, found.cpus
    if offer.gpus is not None and offer.gpus > len(gpus):
        raise ValueError(f"host {offer.name!r} is said to have {offer.gpus} GPUs, but its agent has found {len(gpus)}")
    memory = found.memory_bytes if offer.memory is None else min(offer.memory, found.memory_bytes)
    return Hardware(found.names | {offer.name}, cpus[: offer.cpus], memory, gpus[: offer.gpus])


def place_on_hosts(nodes: Sequence[NodeSpec], hosts: Mapping[str, Hardware]) -> dict[str, HostPlace]:
    """The host and place of every process, by node_id; those of one node of the program share them.

    Raises:
        ValueError: a group wants more than all hosts together have left, or a host that is not there.
    """
    return _places(nodes, hosts, _hosts_of(nodes, _rooms(hosts)), {})


def place_again(
    nodes: Sequence[NodeSpec],
    hosts: Mapping[str, Hardware],
    staying: Sequence[NodeSpec],
    places: Mapping[str, HostPlace],
    only_spares: bool = False,
) -> dict[str, HostPlace]:
    """New places for the nodes of a host that is lost, beside those that stay where `places` says.

    A host without nodes, a spare, takes all of them if it can; else (unless `only_spares`) they go where there is room,
    as at the start.

    Raises:
        ValueError: the hosts that are left do not have what a group wants.
    """
    if not hosts:
        raise ValueError("no host is left")
    missing = ValueError("no host is without nodes")
    taken = {spec.node_id: places[spec.node_id] for spec in staying}
    for candidates in _candidates(hosts, taken, only_spares):
        rooms = _rooms(candidates)
        for spec in {spec.name: spec for spec in staying}.values():
            if taken[spec.node_id].host in rooms:
                rooms[taken[spec.node_id].host].take(spec)
        try:
            host_of = _hosts_of(nodes, rooms)
        except ValueError as error:
            missing = error
        else:
            return _places(nodes, hosts, host_of, taken)
    raise missing


def _candidates(
    hosts: Mapping[str, Hardware], taken: Mapping[str, HostPlace], only_spares: bool
) -> Iterator[Mapping[str, Hardware]]:
    """Each spare by itself, then all hosts."""
    in_use = {found.host for found in taken.values()}
    yield from ({name: hardware} for name, hardware in hosts.items() if name not in in_use)
    if not only_spares:
        yield hosts


def _rooms(hosts: Mapping[str, Hardware]) -> dict[str, _Room]:
    return {name: _Room(hardware, len(hardware.gpus), hardware.memory_bytes) for name, hardware in hosts.items()}


def _hosts_of(nodes: Sequence[NodeSpec], rooms: Mapping[str, _Room]) -> dict[str, str]:
    """By the name of the node of the program; takes the room."""
    groups: dict[str, dict[str, NodeSpec]] = {}
    for spec in nodes:
        groups.setdefault(spec.label, {}).setdefault(spec.name, spec)
    host_of: dict[str, str] = {}
    for label, members in groups.items():
        specs = list(members.values())
        shares = _shares(label, specs, rooms)
        names = [name for name, share in shares.items() for _ in range(share)]
        for spec, name in zip(specs, names, strict=True):
            rooms[name].take(spec)
            host_of[spec.name] = name
    return host_of


def _shares(label: str, specs: Sequence[NodeSpec], rooms: Mapping[str, _Room]) -> dict[str, int]:
    """How many of a group's nodes go to each host: as even as the room allows."""
    spec, left = specs[0], len(specs)
    room = {name: one.count(spec, left) for name, one in rooms.items()}
    if sum(room.values()) < left:
        raise ValueError(_what_is_missing(label, spec, sum(room.values()), left, rooms))
    if left == 1:  # beside as few others as possible
        fitting = [name for name in rooms if room[name]]
        return {min(fitting, key=lambda name: len(rooms[name].nodes)): 1}
    shares = dict.fromkeys(rooms, 0)
    while left:
        open_hosts = [name for name in rooms if shares[name] < room[name]]
        even = max(1, left // len(open_hosts))
        for name in open_hosts:
            more = min(even, room[name] - shares[name], left)
            shares[name] += more
            left -= more
    return shares


def _places(
    nodes: Sequence[NodeSpec],
    hosts: Mapping[str, Hardware],
    host_of: Mapping[str, str],
    taken: Mapping[str, HostPlace],
) -> dict[str, HostPlace]:
    found: dict[str, HostPlace] = {}
    here: dict[str, list[NodeSpec]] = {name: [] for name in hosts}
    for spec in nodes:
        anywhere = dataclasses.replace(spec, resources=dataclasses.replace(spec.resources, host=None))
        here[host_of[spec.name]].append(anywhere)
    for name, hardware in hosts.items():
        beside = [other.place for other in taken.values() if other.host == name]
        new = place_all(here[name], hardware, beside)
        found.update({node_id: HostPlace(name, place) for node_id, place in new.items()})
    return {spec.node_id: found[spec.node_id] for spec in nodes}


def _what_is_missing(label: str, spec: NodeSpec, fitting: int, wanted: int, rooms: Mapping[str, _Room]) -> str:
    asked = spec.resources
    if asked.host is not None and not any(asked.host in room.hardware.names for room in rooms.values()):
        return f"group {label!r} must run on host {asked.host!r}, which is not one of {', '.join(rooms)}"
    wants = [
        *([f"{asked.gpus} GPUs"] if asked.gpus else []),
        *([f"{asked.memory / _GIB:.1f} GiB of memory"] if asked.memory else []),
        *([f"{asked.cpus} cores"] if asked.cpus else []),
    ]
    where = f" on host {asked.host!r}" if asked.host is not None else ""
    left = "; ".join(
        f"{name}: {room.gpus} of {len(room.hardware.gpus)} GPUs, {room.memory / _GIB:.1f} GiB, "
        f"{len(room.hardware.cpus)} cores"
        for name, room in rooms.items()
    )
    return (
        f"group {label!r} wants {' and '.join(wants)}{where} for each of its {wanted} nodes, but only {fitting} of "
        f"them fit beside the groups before it. What the hosts have left: {left}"
    )
