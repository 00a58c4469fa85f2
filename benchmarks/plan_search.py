"""The time that searches of plans take, on models that the published optimizer is slow at, and their quality.

Times are of this process's CPU. `published_optimizer` runs PipeDream's beside it, where there is a checkout of it.
"""

import math
import random
import time
from collections.abc import Sequence
from typing import Any

import lp_pipe.pipeline as pp
from benchmarks.report import show_table
from lp_pipe.pipeline.partitioning.cost import Memory
from lp_pipe.pipeline.partitioning.min_memory import min_memory
from lp_pipe.pipeline.partitioning.states import states_of
from tests.pipeline.partitioning.brute_force import best

_SEED = 1
_LITTLE = 1.1  # of the least memory that any plan needs
GOALS_S = {
    "ResNet-50's size, 4 x 4 devices": 3.0,
    "chain of 1,000, 64 devices": 5.0,
    "the same, little memory": 5.0,
}


def figures(brute_force_cases: int, *, is_quick: bool) -> dict[str, Any]:
    """Return every case's seconds, plan and gap, and how often brute force has found a better plan."""
    flat = pp.Topology([pp.Level("device", 64, bandwidth=10.0)])
    nested = pp.Topology([pp.Level("device", 4, bandwidth=10.0), pp.Level("host", 4, bandwidth=1.0)])
    long = chain(100 if is_quick else 1000)
    cases = {
        "ResNet-50's size, 4 x 4 devices": (resnet_50(), nested),
        "chain of 1,000, 64 devices": (long, flat),
        "the same, little memory": (long, pp.Topology(flat.levels, _LITTLE * _least_memory(long, flat))),
        "Inception's size, 4 x 4 devices": (branches([6, 12, 15, 13], 2 if is_quick else 11), nested),
    }
    return {
        "searches": {name: _searched(name, profile, topology) for name, (profile, topology) in cases.items()},
        "brute_force": _against_brute_force(brute_force_cases),
    }


def _least_memory(profile: pp.Profile, topology: pp.Topology) -> float:
    """Return the bytes of a device that a plan needs for 1F1B, as `partition` counts them."""
    memory = Memory(0.0, 2.0, "1f1b", "none", 8)
    return min_memory(states_of(profile, "none", 0), memory, topology.devices, topology.devices).most


def _searched(name: str, profile: pp.Profile, topology: pp.Topology) -> dict[str, Any]:
    started = time.process_time()
    plan = pp.partition(profile, topology)
    return {
        "layers": len(profile.layers),
        "cpu_s": time.process_time() - started,
        "goal_s": GOALS_S.get(name),
        "stages": len(plan.stages),
        "devices": plan.devices,
        "slowest_s": plan.slowest_seconds,
        "proven_gap": plan.proven_gap,
        "reason": plan.reason,
    }


def _against_brute_force(cases: int) -> dict[str, Any]:
    draw = random.Random(_SEED)
    worst = 0.0
    for _ in range(cases):
        profile = _small(draw)
        topology = pp.Topology([pp.Level("device", draw.randint(1, 4), bandwidth=draw.choice([0.5, 3.0, 40.0]))])
        expected = best(profile, topology)
        worst = max(worst, abs(pp.partition(profile, topology).slowest_seconds - expected) / max(expected, 1e-12))
    return {"cases": cases, "largest_relative_difference": worst}


def _small(draw: random.Random) -> pp.Profile:
    """Return a random DAG of up to five layers."""
    names = [f"l{i}" for i in range(draw.randint(1, 5))]
    layers = tuple(pp.LayerProfile(name, *(float(draw.randint(0, 8)) for _ in range(4))) for name in names)
    pairs = [(a, b) for j, b in enumerate(names) for a in names[:j]]
    return pp.Profile(layers, tuple(pair for pair in pairs if draw.random() < 0.5))


def chain(layers: int) -> pp.Profile:
    """Return layers with random seconds and bytes."""
    return _profile(layers, None)


def resnet_50() -> pp.Profile:
    """Return its 177 layers: 16 blocks of ten, of which four have two more beside them, and the layers around them."""
    edges: list[tuple[int, int]] = []
    last = _run(edges, None, 0, 4)
    end = 4
    for block in range(16):
        start, first = last, end
        last = _run(edges, start, first, 8)
        end = first + 8
        beside = start
        if block in (0, 3, 7, 13):
            beside = _run(edges, start, end, 2)
            end += 2
        edges += [(last, end), (beside, end)]
        last = _run(edges, end, end + 1, 1)
        end += 2
    end = 1 + _run(edges, last, end, 5)
    return _profile(end, edges)


def branches(lengths: Sequence[int], modules: int) -> pp.Profile:
    """Return modules of branches side by side, each joined by one layer, as Inception has them."""
    edges: list[tuple[int, int]] = []
    last, end = 0, 1
    for _ in range(modules):
        ends = []
        for length in lengths:
            ends.append(_run(edges, last, end, length))
            end += length
        edges += [(branch, end) for branch in ends]
        last, end = end, end + 1
    return _profile(end, edges)


def towers(lengths: Sequence[int], trunk: int) -> pp.Profile:
    """Return chains that each start with a source of their own, joined by a last chain."""
    edges: list[tuple[int, int]] = []
    ends, end = [], 0
    for length in lengths:
        ends.append(_run(edges, None, end, length))
        end += length
    edges += [(last, end) for last in ends]
    return _profile(1 + _run(edges, None, end, trunk), edges)


def _run(edges: list[tuple[int, int]], before: int | None, first: int, count: int) -> int:
    """Add so many layers one behind the other, and return the last one."""
    layers = range(first, first + count)
    edges += zip([*([before] if before is not None else []), *layers], layers[before is None :], strict=False)
    return layers[-1]


def _profile(layers: int, edges: Sequence[tuple[int, int]] | None) -> pp.Profile:
    draw = random.Random(_SEED).random
    measured = tuple(pp.LayerProfile(f"l{i}", draw(), 2 * draw(), draw(), draw()) for i in range(layers))
    return pp.Profile(measured, None if edges is None else tuple((f"l{a}", f"l{b}") for a, b in edges))


def show(figures: dict[str, Any]) -> None:
    rows = [
        [
            name,
            str(case["layers"]),
            f"{case['cpu_s']:.2f}",
            "" if case["goal_s"] is None else f"{case['goal_s']:g}",
            f"{case['stages']} on {case['devices']}",
            f"{case['proven_gap']:.2%}",
        ]
        for name, case in figures["searches"].items()
    ]
    show_table("Finding a plan", ["", "layers", "CPU s", "goal s", "stages on devices", "proven gap"], rows)
    found = figures["brute_force"]
    is_best = math.isclose(found["largest_relative_difference"], 0.0, abs_tol=1e-9)
    rows = [["random small DAGs", str(found["cases"]), "always the best" if is_best else "NOT always the best"]]
    show_table("Against brute force", ["", "cases", "plans"], rows)
