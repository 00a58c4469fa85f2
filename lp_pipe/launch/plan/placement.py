"""Give each node its cores and GPUs on one host. What the host lacks is an error before anything starts."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lp_pipe.launch.plan.hardware import Hardware
from lp_pipe.launch.plan.spec import NodeSpec

T = TypeVar("T")
_GIB = 1 << 30


@dataclass(frozen=True)
class Placement:
    """The cores and GPUs of one node.

    cpus: the cores it is pinned to; empty: not pinned. gpus: the names in its CUDA_VISIBLE_DEVICES.
    """

    cpus: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[int, ...]:
        """The GPUs' numbers, as in `context().devices`. GPUs that are named by UUID have none."""
        return tuple(int(name) for name in self.gpus if name.isdecimal())

    @property
    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}


def place_all(nodes: Sequence[NodeSpec], host: Hardware, taken: Sequence[Placement] = ()) -> dict[str, Placement]:
    """Return the placement of every process, by node_id. The processes of one node of the program share it.

    No two nodes share a GPU. Cores are given out in order. When all are taken, the least used ones are given out again.

    taken: what other nodes already have (the caller must have counted their memory).

    Raises:
        ValueError: a group wants more than the host has, or another host; the message says what it wants and what the
            host has.
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


def place_with_room(
    nodes: Sequence[NodeSpec], may_wait: Callable[[NodeSpec], bool], place: Callable[[Sequence[NodeSpec]], dict[str, T]]
) -> dict[str, T]:
    """Return the placements of as many nodes as have room; of those that may wait, the last ones are left out first.

    place: places nodes, or raises ValueError.

    Raises:
        ValueError: there is no room for the nodes that may not wait.
    """
    last_first = sorted({(-spec.index, spec.name) for spec in nodes if may_wait(spec)})

    def tried(count: int) -> dict[str, T] | ValueError:
        """Place all nodes but so many of those that may wait."""
        left_out = {name for _, name in last_first[:count]}
        try:
            return place([spec for spec in nodes if spec.name not in left_out])
        except ValueError as error:
            return error

    found = tried(0)
    if isinstance(found, ValueError) and last_first:
        found = tried(len(last_first))
        too_few, enough = 0, len(last_first)
        while not isinstance(found, ValueError) and enough - too_few > 1:  # the fewer nodes, the more room
            middle = (too_few + enough) // 2
            if isinstance(some := tried(middle), ValueError):
                too_few = middle
            else:
                found, enough = some, middle
    if isinstance(found, ValueError):
        raise found
    return found


def _check_hosts(nodes: Sequence[NodeSpec], host: Hardware) -> None:
    for spec in nodes:
        asked = spec.resources.host
        if asked is not None and asked not in host.names:
            raise ValueError(
                f"group {spec.label!r} must run on host {asked!r}, but mode='process' has only this host "
                f"({', '.join(sorted(host.names))}): use mode='multi_host', or leave out host="
            )


def _check_memory(nodes: Iterable[NodeSpec], host: Hardware) -> None:
    total = 0
    for spec in nodes:
        total += spec.resources.memory or 0
        if total > host.memory_bytes:
            raise ValueError(
                f"group {spec.label!r} wants {_gib(spec.resources.memory or 0)} of memory for each of its "
                f"{spec.group_size} nodes, in all {_gib(total)} or more with the groups before it, but this host has "
                f"{_gib(host.memory_bytes)}: ask for less, or use more hosts"
            )


def _hand_out_gpus(nodes: Iterable[NodeSpec], host: Hardware) -> Iterator[str]:
    total = 0
    for spec in nodes:
        total += spec.resources.gpus
        if total > len(host.gpus):
            there_is = f"{len(host.gpus)} ({', '.join(host.gpus)})" if host.gpus else "none"
            raise ValueError(
                f"group {spec.label!r} wants {spec.resources.gpus} GPUs for each of its {spec.group_size} nodes, in "
                f"all {total} or more with the groups before it, but this host has {there_is}"
            )
    return iter(host.gpus)


def _take_gpus(spec: NodeSpec, gpus: Iterator[str]) -> tuple[str, ...]:
    return tuple(next(gpus) for _ in range(spec.resources.gpus))


def _take_cpus(spec: NodeSpec, host: Hardware, used: dict[int, float]) -> tuple[int, ...]:
    """Take the least used cores. Of the last core, count only the fraction that the node asks for."""
    wanted = spec.resources.cpus
    if wanted is None:
        return ()
    if wanted > len(host.cpus):
        raise ValueError(
            f"group {spec.label!r} wants {wanted} cores for each of its nodes, but this host has "
            f"{len(host.cpus)} that the launcher may use"
        )
    cores = sorted(host.cpus, key=lambda core: (used[core], core))[: math.ceil(wanted)]
    for number, core in enumerate(cores):
        used[core] += min(1.0, wanted - number)
    return tuple(sorted(cores))


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
