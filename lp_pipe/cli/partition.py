"""`lp_pipe partition`: compute a plan (cuts, replicas, and the reasons) from a profile and a topology."""

import argparse
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lp_pipe.cli.errors import UsageError
from lp_pipe.cli.table import table
from lp_pipe.errors import PartitionError

if TYPE_CHECKING:
    from lp_pipe.pipeline.partitioning import Plan

EPILOG = """\
examples:
  lp_pipe partition profile.json topology.toml -o plan.toml
  lp_pipe partition graph.txt topology.toml --straight      PipeDream's own format; no replicas
  lp_pipe partition profile.json topology.toml --schedule=pipedream_2bw --optimizer-bytes=3      asynchronous, Adam

topology.toml, from the innermost level outwards, in bytes and bytes/s:
  memory = 16e9
  [[levels]]
  name = "device"
  count = 4
  bandwidth = 1.6e10        on one level only, also: speeds = [1.0, 1.0, 0.5, 0.5]
  [[levels]]
  name = "host"
  count = 2
  bandwidth = 1.25e9
"""


HELP = "decide where to cut a profiled model, and how many replicas each stage gets"
DESCRIPTION = "Find the plan whose slowest stage, or boundary between stages, is as fast as possible."
USAGE = "lp_pipe partition PROFILE TOPOLOGY [-o plan.toml] [options]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("profile", metavar="PROFILE", help="profile.json, or graph.txt from PipeDream's profiler")
    add("topology", metavar="TOPOLOGY", help="topology.toml")
    add("-o", "--output", metavar="FILE", help="write the plan, as TOML, for add_pipeline(stages=pp.Plan.load(FILE))")
    add("--straight", action="store_true", help="no replicas")
    add("--max-replicas", type=int, metavar="R", help="most replicas of a stage (default: the number of devices)")
    add("--cost-model", default="pipedream", metavar="NAME", help="pipedream (default) or overlap")
    add(
        "--schedule",
        default="1f1b",
        metavar="NAME",
        help="1f1b (default), gpipe, pipedream, pipedream_2bw, or auto: 1f1b or gpipe, whichever step is faster",
    )
    add(
        "--recompute",
        default="none",
        metavar="WHAT",
        help="none (default), full, or auto: only the stages whose memory needs it",
    )
    add(
        "--microbatches",
        type=int,
        metavar="M",
        help="micro-batches per step (default: those of the profiled program, or 8)",
    )
    add(
        "--action-seconds",
        type=float,
        default=1e-4,
        metavar="S",
        help="overhead of an action, to warn of stages that are too short (default: 1e-4)",
    )
    add(
        "--optimizer-bytes",
        type=float,
        default=2.0,
        metavar="X",
        help="bytes of gradients and optimizer state per byte of parameters; used if the topology limits memory "
        "(default: 2)",
    )
    add(
        "--device-order",
        default="any",
        metavar="WHAT",
        help="order of devices with different speeds: any (default) or given",
    )
    add("--json", action="store_true", help="print the plan as JSON")


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Print the plan, and write it.

    Raises:
        UsageError: a file is invalid or cannot be read or written, or no plan fits.
    """
    from lp_pipe.pipeline.partitioning import Profile, Topology, partition  # numpy is slow to load

    read = Profile.from_pipedream if arguments.profile.endswith(".txt") else Profile.load
    try:
        with warnings.catch_warnings(action="ignore"):  # it is printed below
            plan = partition(
                read(arguments.profile),
                Topology.load(arguments.topology),
                max_replicas=arguments.max_replicas,
                straight=arguments.straight,
                cost_model=arguments.cost_model,
                schedule=arguments.schedule,
                recompute=arguments.recompute,
                optimizer_bytes_per_parameter_byte=arguments.optimizer_bytes,
                microbatches=arguments.microbatches,
                action_seconds=arguments.action_seconds,
                device_order=arguments.device_order,
            )
        if arguments.output:
            plan.save(Path(arguments.output))
    except PartitionError as error:
        raise UsageError(str(error)) from error
    if arguments.json:
        print(json.dumps(asdict(plan)))
        return 0
    print(_as_table(plan))
    print(f"\n{plan.reason}")
    if plan.warning:
        print(f"warning: {plan.warning}")
    if arguments.output:
        print(f"wrote {arguments.output}")
    return 0


def _as_table(plan: "Plan") -> str:
    from lp_pipe.pipeline.partitioning.reasons import seconds

    rows = [
        [
            str(index),
            f"{stage.replicas}{_places('on', stage.devices)}{_places('on hosts', stage.hosts)}",
            f"{len(stage.layers)}: {_ends(stage.layers)}" + (" (recomputed)" if stage.recompute == "full" else ""),
            seconds(stage.predicted_seconds),
            seconds(stage.boundary_seconds),
        ]
        for index, stage in enumerate(plan.stages)
    ]
    return table(["STAGE", "REPLICAS", "LAYERS", "COMPUTE + ALL-REDUCE", "BOUNDARY"], rows)


def _places(what: str, places: Sequence[int | str]) -> str:
    return f" {what} {', '.join(map(str, places))}" if places else ""


def _ends(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]}"
