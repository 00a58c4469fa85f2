"""PipeDream's published optimizer beside ours: the same graph.txt and topology, in the same run.

Its code is not ours to ship: `--pipedream DIR` names a checkout of msr-fiddle/pipedream. Each search is a process of
its own, whose CPU seconds count from its start to its end. Both plans are priced by our cost model: theirs as brute
force prices plans, which is written apart from both searches. What its optimizer says that its plan takes is shown,
too: it does not count what the first stage pays for its boundary, and divides all-reduces between hosts by the number
of a host's devices.
"""

import json
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import lp_pipe.pipeline as pp
from benchmarks.plan_search import branches, chain, resnet_50, towers
from benchmarks.published_plan import flat, nested, stages_of_layers
from benchmarks.report import show_table
from lp_pipe.pipeline.partitioning.states import states_of
from tests.pipeline.partitioning.brute_force import fullest, seconds

SCRIPT = pathlib.Path("optimizer", "optimizer_graph_hierarchical.py")
TIMEOUT_S = 600.0  # of each search
_VGG16 = pathlib.Path(__file__).parents[1] / "tests" / "data" / "vgg16_graph.txt"
_MOST_CUTS = 5000  # that are counted
_WITH_MEMORY = "pipedream"  # its weight versions and stashes are what its optimizer counts

Case = tuple[pp.Profile, pp.Topology]


@dataclass(frozen=True)
class Found:
    """The result of a search, and what it took.

    slowest_s: by our cost model; None: there is no plan of all layers. says_s: as the search has it.
    note: why there is none, or in what it is not like the other.
    """

    cpu_s: float
    slowest_s: float | None = None
    says_s: float | None = None
    stages: int = 0
    devices: int = 0
    note: str = ""


def cases(*, is_quick: bool) -> dict[str, Case]:
    """Return the cases, of which the first is nearly all start-up of the two processes."""
    vgg16 = pp.Profile.from_pipedream(_VGG16)
    four = pp.Level("device", 4, bandwidth=1e10)
    one_level = pp.Topology([pp.Level("device", 8, bandwidth=10.0)])
    small: dict[str, Case] = {
        "two layers, 1 device": (chain(2), pp.Topology([pp.Level("device", 1, bandwidth=10.0)])),
        "VGG-16, 4 devices": (vgg16, pp.Topology([four])),
        "VGG-16, 4 devices of 16 GB": (vgg16, pp.Topology([four], memory=16e9)),
        "VGG-16, 4 x 4 devices": (vgg16, pp.Topology([four, pp.Level("host", 4, bandwidth=1.25e9)])),
        "three sources, 8 devices": (towers([12, 9, 6], 10), one_level),
    }
    if is_quick:
        return small
    hosts = pp.Topology([pp.Level("device", 4, bandwidth=10.0), pp.Level("host", 4, bandwidth=1.0)])
    many = pp.Topology([pp.Level("device", 64, bandwidth=10.0)])
    return small | {
        "3 x 4 branches, 8 devices": (branches([3] * 4, 3), one_level),
        "ResNet-50's size, 4 x 4 devices": (resnet_50(), hosts),
        "chain of 200, 64 devices": (chain(200), many),
        "chain of 1,000, 64 devices": (chain(1000), many),
    }


def figures(checkout: pathlib.Path, wanted: Mapping[str, Case]) -> dict[str, Any]:
    """Return every case's layers, and the result of either optimizer."""
    found = {}
    for name, (profile, topology) in wanted.items():
        with tempfile.TemporaryDirectory() as kept:
            folder = pathlib.Path(kept)
            profile.to_pipedream(folder / "graph.txt")
            topology.save(folder / "topology.toml")
            found[name] = {
                "layers": len(profile.layers),
                "ours": asdict(_ours(folder, topology)),
                "theirs": asdict(theirs(checkout, folder, profile, topology)),
            }
    return found


def _ours(folder: pathlib.Path, topology: pp.Topology) -> Found:
    options = ["--json", f"--schedule={_WITH_MEMORY if topology.memory is not None else '1f1b'}"]
    command = ["-m", "lp_pipe", "partition", f"{folder / 'graph.txt'}", f"{folder / 'topology.toml'}"]
    printed, cpu_s, problem = _run([*command, *options], pathlib.Path.cwd())
    if problem:
        return Found(cpu_s, note=problem)
    plan = json.loads(printed)
    slowest_s = plan["slowest_seconds"]
    gap = f"the best may be {plan['proven_gap']:.1%} faster" if plan["proven_gap"] else ""
    devices = sum(stage["replicas"] for stage in plan["stages"])
    return Found(cpu_s, slowest_s, slowest_s, len(plan["stages"]), devices, gap)


def theirs(checkout: pathlib.Path, folder: pathlib.Path, profile: pp.Profile, topology: pp.Topology) -> Found:
    """Return what PipeDream's optimizer finds for the folder's graph.txt, which is this profile."""
    folder_of_script = checkout.resolve() / SCRIPT.parent  # it imports by a path relative to that
    printed, cpu_s, problem = _run([SCRIPT.name, *_options(folder, topology)], folder_of_script)
    if problem:
        return Found(cpu_s, note=problem)
    written = folder / f"gpus={topology.devices}.txt"
    if not written.is_file():
        return Found(cpu_s, note="writes no plan")
    stage_of = stages_of_layers(written.read_text())
    if left_out := len(profile.layers) - len(stage_of):
        return Found(cpu_s, note=f"{left_out} layers in no stage")
    if any(stage_of[profile.layers[a].name] > stage_of[profile.layers[b].name] for a, b in profile.links):
        return Found(cpu_s, note="reads from a later stage")
    stages = nested(printed, stage_of, profile)
    plan = flat(stages, profile, seconds(stages, profile, topology.levels))
    says = re.search(r"(?m)^Time per stage in pipeline: (\S+)$", printed)
    says_s = float(says[1]) if says is not None else None
    note = _unexplored(printed, profile) or _above_memory(plan, profile, topology)
    return Found(cpu_s, plan.slowest_seconds, says_s, len(plan.stages), plan.devices, note)


def _options(folder: pathlib.Path, topology: pp.Topology) -> list[str]:
    """Return the options of its script.

    A compression of 1 has it count transfers. With a memory limit it may not leave devices idle: it fails then.
    """
    counts = [str(level.count) for level in topology.levels]
    bandwidths = [str(level.bandwidth) for level in topology.levels]
    memory = ["--use_memory_constraint", "-s", str(topology.memory)]
    return [
        *("-n", *counts, "-b", *bandwidths, "-f", f"{folder / 'graph.txt'}", "-o", f"{folder}"),
        *("--activation_compression_ratio", "1"),
        *(["--use_fewer_machines"] if topology.memory is None else memory),
    ]


def _run(arguments: Sequence[str], folder: pathlib.Path) -> tuple[str, float, str]:
    """Return what a Python script prints, its CPU seconds, and why it has failed."""
    before = _children_s()
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return "", _children_s() - before, f"no plan in {TIMEOUT_S:g} s"
    said = done.stderr.splitlines() or ["it says nothing"]
    return done.stdout, _children_s() - before, f"failed: {said[-1]}" if done.returncode else ""


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _unexplored(printed: str, profile: pp.Profile) -> str:
    """Say where its states are not all places to cut: of several sources it starts at the first only."""
    states = states_of(profile, "none", _MOST_CUTS)
    explored = re.search(r"Total number of states: (\d+)", printed)
    if explored is None or not states.is_complete or int(explored[1]) == states.count - 1:
        return ""
    return f"explores {int(explored[1]):,} of {states.count - 1:,} cuts"


def _above_memory(plan: pp.Plan, profile: pp.Profile, topology: pp.Topology) -> str:
    """Say how much memory its plan needs by our count, with what an optimizer keeps, if that is too much."""
    needed = fullest(plan, profile, _WITH_MEMORY, 2.0, 8)
    return f"needs {needed / 1e9:.1f} GB" if topology.memory is not None and needed > topology.memory else ""


def show(figures: dict[str, Any]) -> None:
    """Show a table, with ratios only where both have done the same work."""
    rows = []
    for name, case in figures.items():
        our, their = case["ours"], case["theirs"]
        is_like = not their["note"] and our["slowest_s"] is not None
        ratios = [f"{their[key] / our[key]:.2f}" if is_like else "" for key in ("cpu_s", "slowest_s")]
        cpu = [f"{found['cpu_s']:.2f}" for found in (our, their)]
        slowest = [
            "" if value is None else f"{value:.4g}" for value in (our["slowest_s"], their["slowest_s"], their["says_s"])
        ]
        note = "; ".join(filter(None, (our["note"] and f"ours: {our['note']}", their["note"])))
        rows.append(
            [
                name,
                str(case["layers"]),
                *cpu,
                ratios[0],
                *slowest,
                ratios[1],
                textwrap.shorten(note, 28, placeholder="…"),
            ]
        )
    columns = ["", "layers", "CPU s", "theirs", "ratio", "slowest s", "theirs", "says", "ratio", "theirs"]
    show_table("Beside PipeDream's published optimizer", columns, rows)
