"""On which hosts a nested plan has the replicas of its stages."""

from collections.abc import Sequence
from math import prod

from lp_pipe.pipeline.partitioning.search import Part
from lp_pipe.pipeline.partitioning.topology import Level


def hosts_of(parts: Sequence[Part], levels: Sequence[Level]) -> list[tuple[int, ...]]:
    """Of each innermost stage the hosts of its replicas, numbered from 0; empty where the levels do not say any.

    A host is one of the level called "host", or else of the second level. A stage whose copies are on several groups
    has its replicas there in turn, so that a micro-batch, which replica j mod r of each stage takes, stays in a group:

        two hosts, each with a pipeline of two stages    stage 0: hosts 0 1    stage 1: hosts 0 1
        the same with two replicas of its first stage    stage 0: hosts 0 1 0 1
    """
    names = [level.name for level in levels]
    if "host" in names:
        return _placed(parts, levels, names.index("host"))
    if len(levels) > 1:
        return _placed(parts, levels, 1)
    return [() for _ in parts]


def _placed(parts: Sequence[Part], levels: Sequence[Level], host: int) -> list[tuple[int, ...]]:
    """Counted from the first host of these levels, of which `host` is the place of that whose groups are hosts."""
    inner = levels[:-1]
    size = prod(level.count for level in inner[host:]) if len(inner) >= host else 0  # hosts of a group; 0: part of one
    first = 0
    found: list[tuple[int, ...]] = []
    for part in parts:
        for inside in _placed(part.inside, inner, host) if part.inside else [(0,)]:
            every = range(part.replicas * len(inside))
            found.append(tuple((first + j % part.replicas) * size + inside[j // part.replicas] for j in every))
        first += part.replicas
    return found
