"""Read what PipeDream's published optimizer prints and writes: which layers are in which stage, and its replicas.

For two levels it prints, the outermost first, a list of stages for each stage of the level above, the states from which
and to which they reach, their seconds and their replicas:

    Level 2                       Level 1
    (Split start, … stage:        (Split start, … stage:        (Split start, … stage:
    (0, 15) 0.508686 3            (0, 9) 0.31 1                 (15, 40) 0.163849 4
    (15, 40) 0.163849 1           (9, 15) 0.19 3

The graph that it writes has the stages of the innermost level, numbered in this order, as ` -- stage_id=2` of layers.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count

from lp_pipe.pipeline import Plan, PlannedStage, Profile
from tests.pipeline.partitioning.brute_force import Layers, Stage

_STAGES = "(Split start, split end) / compute time taken per stage / replication factor per stage:"


def stages_of_layers(graph: str) -> dict[str, int]:
    """Return the number of each layer's stage; layers that it has forgotten have none."""
    parts = (line.split(" -- ") for line in graph.splitlines() if not line.startswith("\t"))
    return {part[0]: int(part[3].removeprefix("stage_id=")) for part in parts if len(part) == 4}


def nested(printed: str, stage_of: Mapping[str, int], profile: Profile) -> tuple[Stage, ...]:
    """Return the stages of the outermost level, each with those inside."""
    levels = [_replicas(text) for text in re.split(r"(?m)^Level \d+$", printed)[1:]]
    members: dict[int, set[int]] = {}
    for place, layer in enumerate(profile.layers):
        members.setdefault(stage_of[layer.name], set()).add(place)
    return _inside(levels, (frozenset(members.get(stage, ())) for stage in count()), frozenset())


def flat(stages: Sequence[Stage], profile: Profile, slowest_s: float) -> Plan:
    """Return the innermost stages, with their replicas over all levels, as a plan."""
    layers = profile.layers
    planned = (
        PlannedStage(tuple(layers[place].name for place in sorted(stage.end - stage.start)), replicas, 0.0)
        for stage, replicas in _leaves(stages, 1)
    )
    return Plan(tuple(planned), slowest_s)


def _replicas(level: str) -> Iterator[list[int]]:
    """Yield the replicas of each list of stages."""
    for text in level.split(_STAGES)[1:]:
        yield [int(replicas) for replicas in re.findall(r"(?m)^\(\d+, \d+\) \S+ (\d+)$", text)]


def _inside(levels: Sequence[Iterator[list[int]]], leaves: Iterator[Layers], done: Layers) -> tuple[Stage, ...]:
    stages = []
    for replicas in next(levels[0]):
        inside = _inside(levels[1:], leaves, done) if levels[1:] else ()
        end = inside[-1].end if inside else done | next(leaves)
        stages.append(Stage(done, end, replicas, inside))
        done = end
    return tuple(stages)


def _leaves(stages: Sequence[Stage], outside: int) -> Iterator[tuple[Stage, int]]:
    for stage in stages:
        replicas = outside * stage.replicas
        yield from _leaves(stage.inside, replicas) if stage.inside else [(stage, replicas)]
