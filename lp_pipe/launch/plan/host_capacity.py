"""Track what each host has left, and choose hosts for the nodes of one group."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lp_pipe.launch.plan.hardware import Hardware
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
