"""`lp_pipe profile`: measure the layers of a program's pipeline."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lp_pipe.cli import host_options
from lp_pipe.cli.errors import NotLaunched, UsageError
from lp_pipe.cli.table import table
from lp_pipe.cli.targets import load_program, own_failure
from lp_pipe.errors import LpPipeError, PartitionError, PipelineError, SerializationError
from lp_pipe.launch.options import LaunchOptions

if TYPE_CHECKING:
    from lp_pipe.pipeline.partitioning import Profile

EPILOG = """\
examples:
  lp_pipe profile examples/char_gpt.py -o profile.json
  lp_pipe profile examples/char_gpt.py -o profile.json -- --layers=12      pass flags to the program
  lp_pipe profile examples/char_gpt.py -o profile.json --busy=2            two at once, which share caches and memory
  lp_pipe profile --links --engine=ssh --hosts=h1,h2 -o topology.toml      measure the links between hosts instead
  lp_pipe partition profile.json topology.toml -o plan.toml                use both results
"""


HELP = "measure the time and memory of a pipeline's layers"
DESCRIPTION = (
    "Train copies of a pipeline's layers for some seconds in this process, on the first micro-batch of "
    "its feeder; the program itself is not launched."
)
USAGE = "lp_pipe profile TARGET [-o profile.json] [options] [-- program flags]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("target", metavar="TARGET", nargs="?", help="path/file.py[:name] or package.module[:name]")
    add(
        "-o",
        "--output",
        metavar="FILE",
        help="write the profile, as JSON (FILE.txt: as PipeDream's graph.txt); with --links the topology, as TOML",
    )
    add("--links", action="store_true", help="measure the links within and between --hosts, by calls between nodes")
    add("--devices-per-host", type=int, default=1, metavar="N", help="--links: devices of each host (default: 1)")
    add("--group", metavar="LABEL", help="the pipeline to measure, if the program has several")
    add("--device", default="cpu", help="cpu (default), cuda, cuda:1")
    add(
        "--busy",
        type=int,
        default=1,
        metavar="N",
        help="measure while N - 1 other processes do the same, like N stages on one host (default: 1)",
    )
    host_options.add_arguments(parser, needed="--links")
    parser.set_defaults(mode="multi_host")


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Measure the layers or the links, print the result and write it.

    Raises:
        UsageError: there is no such target or pipeline, it cannot be measured, or the file cannot be written.
        NotLaunched: torch is missing, or the target's own code, such as its layers, raised.
    """
    _check_output(arguments.output)
    if arguments.links:
        return _profile_links(arguments)
    if arguments.target is None:
        raise UsageError("the following arguments are required: TARGET (or --links); see `lp_pipe profile --help`")
    program = load_program(arguments.target, program_flags)
    try:
        from lp_pipe.measuring.profiling import profile_program
    except ModuleNotFoundError as error:
        raise NotLaunched(f"{error}; a profile needs torch: pip install 'lp_pipe[torch]'") from error
    try:
        profile = profile_program(program, group=arguments.group, device=arguments.device, busy=arguments.busy)
        if arguments.output:
            (profile.to_pipedream if arguments.output.endswith(".txt") else profile.save)(arguments.output)
    except (PipelineError, PartitionError, SerializationError) as error:
        raise UsageError(str(error)) from error
    except Exception as error:  # layers and the loss are user code
        raise NotLaunched(own_failure(arguments.target, error)) from error
    print(_as_table(profile))
    if arguments.output:
        print(f"wrote {arguments.output}")
    return 0


def _profile_links(arguments: argparse.Namespace) -> int:
    from lp_pipe.measuring.link_profile import measure_links, topology_of

    if arguments.target is not None:
        raise UsageError(f"--links measures no TARGET: leave out --links or {arguments.target}")
    if arguments.devices_per_host < 1:
        raise UsageError(f"--devices-per-host must be at least 1, got {arguments.devices_per_host}")
    options = host_options.launch_options(arguments)
    try:
        options["engine"] = engine = LaunchOptions(**options).make_engine()
        links = measure_links([offer.name for offer in engine.hosts()], **options)
        topology = topology_of(links, arguments.devices_per_host)
        if arguments.output:
            topology.save(arguments.output)
    except (LpPipeError, ValueError) as error:
        raise NotLaunched(f"the links cannot be measured: {error}") from error
    rows = [[link.sender, link.receiver, f"{link.latency * 1e6:.0f} us", f"{link.bandwidth:.3g}"] for link in links]
    print(table(["FROM", "TO", "LATENCY", "BYTES/S BOTH WAYS"], rows))
    if arguments.output:
        print(f"wrote {arguments.output}")
    return 0


def _check_output(file: str | None) -> None:
    """Check that the output's folder exists, before a measurement that may take minutes."""
    if file is not None and not (folder := Path(file).absolute().parent).is_dir():
        raise UsageError(f"cannot write {file}: there is no folder {folder}")


def _as_table(profile: "Profile") -> str:
    rows = [
        [
            layer.name,
            _time(layer.forward_s, layer.forward_spread_s),
            _time(layer.backward_s, layer.backward_spread_s),
            f"{layer.activation_bytes:,}",
            f"{layer.parameter_bytes:,}",
            f"{layer.stash_bytes:,}",
            f"{layer.peak_bytes:,}",
            f"{layer.flops:,}",
            f"{layer.backward_flops:,}",
        ]
        for layer in profile.layers
    ]
    sizes = ["OUTPUT BYTES", "PARAMETER BYTES", "KEPT BYTES", "PEAK BYTES"]
    return table(["LAYER", "FORWARD", "BACKWARD", *sizes, "FLOPS", "BACKWARD FLOPS"], rows)


def _time(median: float, spread: float | None) -> str:
    """Return a time in ms, with the spread (the range of half of the rounds) in parentheses."""
    return f"{median * 1000:.3f} ms" + ("" if spread is None else f" ({spread * 1000:.3f})")
