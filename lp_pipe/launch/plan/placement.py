"""Which cores and GPUs of a host each node gets; refuses what the host does not have, before anything starts."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lp_pipe.launch.plan.hardware import Hardware
from lp_pipe.launch.plan.spec import NodeSpec

_GIB = 1 << 30


@dataclass(frozen=True)
class Placement:
    """cpus: cores the node is pinned to, none: not pinned. gpus: what its CUDA_VISIBLE_DEVICES names."""

    cpus: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[int, ...]:
        """The GPUs by number, as `context().devices` shows them; those named by UUID have none."""
        return tuple(int(name) for name in self.gpus if name.isdecimal())

    @property
    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}


def place_all(nodes: Sequence[NodeSpec], host: Hardware, taken: Sequence[Placement] = ()) -> dict[str, Placement]:
    """The place of every process, by node_id; those of one node of the program share its place.

    Each node has its GPUs for itself. Cores are handed out in order, and again from the first (least used) one when
    all are taken. taken: what other nodes have already (memory is the caller's to count).

    Raises:
        ValueError: a group wants more than there is, or another host; says what it wants and what there is.
    """
    first_parts: dict[str, NodeSpec] = {}
    for spec in nodes:
        first_parts.setdefault(spec.name, spec)
    _check_hosts(nodes, host)
    _check_memory(first_parts.values(), host)
    in_use = {gpu for place in taken for gpu in place.gpus}
    free = dataclasses.replace(host, gpus=tuple(gpu for gpu in host.gpus if gpu not in in_use))
    gpus = _hand_out_gpus(first_parts.values(), free)
    used: defaultdict[int, float] = defaultdict(float)
    for core in (core for place in taken for core in place.cpus):
        used[core] += 1
    places = {
        name: Placement(_take_cpus(spec, host, used), _take_gpus(spec, gpus)) for name, spec in first_parts.items()
    }
    return {spec.node_id: places[spec.name] for spec in nodes}


def _check_hosts(nodes: Sequence[NodeSpec], host: Hardware) -> None:
    for spec in nodes:
        asked = spec.resources.host
        if asked is not None and asked not in host.names:
            raise ValueError(
                f"group {spec.label!r} must run on host {asked!r}, but mode='process' only has this one: "
                f"{', '.join(sorted(host.names))}"
            )


def _check_memory(nodes: Iterable[NodeSpec], host: Hardware) -> None:
    total = 0
    for spec in nodes:
        total += spec.resources.memory or 0
        if total > host.memory_bytes:
            raise ValueError(
                f"group {spec.label!r} wants {_gib(spec.resources.memory or 0)} of memory for each of its "
                f"{spec.group_size} nodes, with the groups before it {_gib(total)} or more: this host has "
                f"{_gib(host.memory_bytes)}"
            )


def _hand_out_gpus(nodes: Iterable[NodeSpec], host: Hardware) -> Iterator[str]:
    total = 0
    for spec in nodes:
        total += spec.resources.gpus
        if total > len(host.gpus):
            there_is = f"{len(host.gpus)} ({', '.join(host.gpus)})" if host.gpus else "none"
            raise ValueError(
                f"group {spec.label!r} wants {spec.resources.gpus} GPUs for each of its {spec.group_size} nodes, with "
                f"the groups before it {total} or more: of GPUs that the launcher may use this host has {there_is}"
            )
    return iter(host.gpus)


def _take_gpus(spec: NodeSpec, gpus: Iterator[str]) -> tuple[str, ...]:
    return tuple(next(gpus) for _ in range(spec.resources.gpus))


def _take_cpus(spec: NodeSpec, host: Hardware, used: dict[int, float]) -> tuple[int, ...]:
    """Take the least used cores, of the last one only the fraction that the node asks for."""
    wanted = spec.resources.cpus
    if wanted is None:
        return ()
    if wanted > len(host.cpus):
        raise ValueError(
            f"group {spec.label!r} wants {wanted} cores for each of its nodes: of cores that the launcher may use this "
            f"host has {len(host.cpus)}"
        )
    cores = sorted(host.cpus, key=lambda core: (used[core], core))[: math.ceil(wanted)]
    for number, core in enumerate(cores):
        used[core] += min(1.0, wanted - number)
    return tuple(sorted(cores))


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
