"""Plans by trying everything: written apart from lp_pipe's search, for small profiles."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import NamedTuple

import lp_pipe.pipeline as pp
from lp_pipe.pipeline import Level, Plan, Profile, Topology
from lp_pipe.pipeline.schedule import replicated, share
from lp_pipe.pipeline.schedule.updates import Timing, Updates, turns

Layers = frozenset[int]


class Stage(NamedTuple):
    """Layers start..end (sets that are done before and after it), and its stages inside of the level."""

    start: Layers
    end: Layers
    replicas: int
    inside: "tuple[Stage, ...]"


def best(
    profile: Profile,
    topology: Topology,
    *,
    max_replicas: int = 10**9,
    cost_model: str = "pipedream",
    schedule: str = "1f1b",
    optimizer: float = 2.0,
    microbatches: int = 8,
    recompute: str = "none",
) -> float:
    """The slowest stage or side of the best plan; inf if none fits the memory."""
    everything = frozenset(range(len(profile.layers)))
    costs = [
        seconds(plan, profile, topology.levels, cost_model, again)
        for plan in _plans(frozenset(), everything, profile, topology.levels, max_replicas)
        for again in _choices(_flat(plan), recompute)
        if topology.memory is None
        or all(
            need <= topology.memory for need in _bytes(_flat(plan), profile, schedule, optimizer, microbatches, again)
        )
    ]
    return min(costs, default=float("inf"))


def _choices(stages: Sequence[Stage], recompute: str) -> Iterator[tuple[Stage, ...]]:
    """Return each choice of layers that run their forward again."""
    counts = {"none": [0], "full": [len(stages)], "auto": range(len(stages) + 1)}[recompute]
    for count in counts:
        yield from combinations(stages, count)


def fullest(plan: Plan, profile: Profile, schedule: str, optimizer: float, microbatches: int) -> float:
    """Bytes of the fullest device of a plan, with what it says of recompute."""
    index = {layer.name: place for place, layer in enumerate(profile.layers)}
    stages: list[Stage] = []
    done: Layers = frozenset()
    for stage in plan.stages:
        after = done | {index[name] for name in stage.layers}
        stages.append(Stage(done, after, stage.replicas, ()))
        done = after
    again = [stage for stage, planned in zip(stages, plan.stages, strict=True) if planned.recompute == "full"]
    return max(_bytes(stages, profile, schedule, optimizer, microbatches, again))


def closed_sets(profile: Profile) -> list[Layers]:
    """Return all sets of layers that have, with a layer, what it reads."""
    count = len(profile.layers)
    subsets = [frozenset(i for i in range(count) if bits >> i & 1) for bits in range(2**count)]
    return [s for s in subsets if all(source in s for source, reader in profile.links if reader in s)]


def _plans(
    start: Layers, end: Layers, profile: Profile, levels: Sequence[Level], most: int
) -> Iterator[tuple[Stage, ...]]:
    if not levels:
        yield ()
        return
    yield from _sequences(start, end, levels[-1].count, profile, levels, most, closed_sets(profile))


def _sequences(
    start: Layers,
    end: Layers,
    devices: int,
    profile: Profile,
    levels: Sequence[Level],
    most: int,
    sets: Sequence[Layers],
) -> Iterator[tuple[Stage, ...]]:
    if start == end:
        yield ()
        return
    for cut in sets:
        if start < cut <= end:
            for replicas in range(1, min(devices, most) + 1):
                rests = list(_sequences(cut, end, devices - replicas, profile, levels, most, sets))
                for inside in _plans(start, cut, profile, levels[:-1], most // replicas) if rests else ():
                    for rest in rests:
                        yield (Stage(start, cut, replicas, inside), *rest)


def seconds(
    plan: Sequence[Stage],
    profile: Profile,
    levels: Sequence[Level],
    cost_model: str = "pipedream",
    again: Sequence[Stage] = (),
) -> float:
    """The slowest stage or side of that plan. again: the stages that run their forward twice."""
    level = levels[-1]
    slowest = 0.0
    for place, stage in enumerate(plan):
        own = [profile.layers[i] for i in stage.end - stage.start]
        r = stage.replicas
        forwards = 2 if any(stage[:2] == other[:2] for other in again) else 1
        compute = sum(forwards * layer.forward_s + layer.backward_s for layer in own)
        if stage.inside:
            compute = seconds(stage.inside, profile, levels[:-1], cost_model, again)
        exchange = 4 * (r - 1) * sum(layer.parameter_bytes for layer in own) / (r * level.bandwidth)
        exchange += 2 * (r - 1) * level.latency
        took = (compute + exchange if cost_model == "pipedream" else max(compute, exchange)) / r
        sides = [stage.start] * (place > 0) + [stage.end] * (place < len(plan) - 1)
        slowest = max(slowest, took, *(_side(_crossing(s, profile), level, r) for s in sides), 0.0)
    return slowest


def _side(crossing: float, level: Level, replicas: int) -> float:
    return (2 * crossing / level.bandwidth + (2 * level.latency if crossing else 0)) / replicas


def _crossing(done: Layers, profile: Profile) -> float:
    awaited = {source for source, reader in profile.links if source in done and reader not in done}
    return sum(profile.layers[i].activation_bytes for i in awaited)


def _flat(plan: Sequence[Stage], copies: int = 1) -> list[Stage]:
    """The innermost stages, each with its replicas over all levels."""
    flat: list[Stage] = []
    for stage in plan:
        own = stage._replace(replicas=copies * stage.replicas)
        flat += _flat(stage.inside, own.replicas) if stage.inside else [own]
    return flat


@cache
def held(schedule: str, replicas: tuple[int, ...], microbatches: int) -> tuple[tuple[int, int], ...]:
    """Return by stage the most micro-batches that wait on a replica, and the versions of its weights."""
    if schedule in ("pipedream", "pipedream_2bw"):
        timings = Updates(coalesced=schedule == "pipedream_2bw").timings(replicas)
        return tuple(
            (_most_in_flight(timing, own), 2 if schedule == "pipedream_2bw" else timing.delay + 1)
            for timing, own in zip(timings, replicas, strict=True)
        )
    made = replicated(schedule, list(replicas), microbatches)
    first = replace(made, workers=tuple(share(made.workers[worker], own, 0) for worker, own in enumerate(replicas)))
    return tuple((peak, 1) for peak in pp.peak_activations(first))


def _most_in_flight(timing: Timing, replicas: int) -> int:
    """Return the most micro-batches in flight on a stage's first replica, in the steady state of long steps."""
    waiting, most, many = 0, 0, 100 * timing.every
    for turn in turns(timing, 0, replicas, many, ahead=many):
        waiting += {"F": 1, "B": -1, "U": 0}[turn.op]
        most = max(most, waiting)
    return most


def _bytes(
    stages: Sequence[Stage],
    profile: Profile,
    schedule: str,
    optimizer: float,
    microbatches: int,
    again: Sequence[Stage],
) -> Iterator[float]:
    counts = held(schedule, tuple(stage.replicas for stage in stages), microbatches)
    for stage, (waiting, versions) in zip(stages, counts, strict=True):
        own = [profile.layers[i] for i in stage.end - stage.start]
        weights = sum(layer.parameter_bytes for layer in own) * (versions + optimizer)
        activations = sum(layer.activation_bytes for layer in own)
        if any(stage[:2] == other[:2] for other in again):
            yield weights + waiting * _crossing(stage.start, profile) + activations
        else:
            yield weights + waiting * activations
