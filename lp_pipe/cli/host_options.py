"""The options of `lp_pipe launch` and `profile` for several hosts, and the plan of a --dry-run."""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lp_pipe.cli.errors import UsageError
from lp_pipe.connections.tcp_carriers import TRANSPORTS
from lp_pipe.launch.dry_run import describe_launch
from lp_pipe.launch.elastic import HostCount
from lp_pipe.launch.engines import BUILT_IN, engine_class
from lp_pipe.launch.options import HOST_OPTIONS, LaunchOptions
from lp_pipe.program import Program

_OPTION = "option_"


def add_arguments(parser: argparse.ArgumentParser, needed: str = "--mode=multi_host") -> None:
    """Add the options for several hosts, including those of the built-in engines."""
    group = parser.add_argument_group(f"several hosts ({needed})")
    group.add_argument(
        "--engine",
        metavar="NAME",
        help=f"the engine that starts an agent on each host: {', '.join(BUILT_IN)} (default: local)",
    )
    group.add_argument("--hosts", metavar="H1,H2:gpus=4|FILE", help="the hosts; for local, slurm, ray: their number")
    group.add_argument("--listen", metavar="ADDRESS", help="where the hosts reach this one (default: found)")
    group.add_argument("--interface", metavar="NAME", help="by which the hosts reach each other (default: found)")
    group.add_argument(
        "--transport", choices=list(TRANSPORTS), help="the transport of all traffic between hosts (default: auto: tls)"
    )
    group.add_argument("--sync", metavar="DIR", help="copy this source folder to the hosts; only changes are sent")
    group.add_argument("--join-timeout", type=float, metavar="S", help="seconds for all hosts to join (default: 60)")
    group.add_argument(
        "--host-timeout", type=float, metavar="S", help="seconds of silence after which a host is lost (default: 7)"
    )
    group.add_argument(
        "--engine-option", action="append", default=[], metavar="NAME=VALUE", help="an option of an engine of your own"
    )
    helps: dict[str, dict[str, list[str]]] = {}  # by option, by text: the engines that have it
    for name in BUILT_IN:
        for option, text in engine_class(name).OPTIONS.items():
            helps.setdefault(option, {}).setdefault(text, []).append(name)
    for option, texts in helps.items():
        flag = f"--{option.replace('_', '-')}"
        help_text = "; ".join(f"{', '.join(names)}: {text}" for text, names in texts.items())
        group.add_argument(flag, dest=_OPTION + option, metavar="…", help=help_text)


def add_launch_only(parser: argparse.ArgumentParser) -> None:
    """Add the options that only `launch` has."""
    parser.add_argument(
        "--elastic",
        metavar="MIN:MAX",
        help="run on MIN to MAX hosts: TARGET is a function of their number, called again when a host leaves or joins",
    )
    parser.add_argument("--dry-run", action="store_true", help="print which node would run where; start no node")


def launch_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `launch` that these options give.

    Raises:
        UsageError: an option for several hosts in another mode, or an unknown engine.
    """
    given = {**vars(arguments), "engine_options": engine_options(arguments)}
    options = {name: given[name] for name in HOST_OPTIONS if given[name] not in (None, "", {})}
    if vars(arguments).get("elastic"):
        _check_elastic(arguments)
    if options and arguments.mode != "multi_host":
        flag = f"--{next(iter(options)).replace('_', '-')}"
        raise UsageError(f"{flag} needs several hosts: add --mode=multi_host")
    if arguments.engine:
        try:
            engine_class(arguments.engine)
        except ValueError as error:
            raise UsageError(f"--engine={arguments.engine}: {error}") from error
    return options


def plan_lines(program: Program, arguments: argparse.Namespace) -> list[str]:
    """Return lines that say which node would run where, and how much memory the processes of a pipeline need.

    Raises:
        LaunchError, ValueError: the hosts do not join, or lack resources that the program needs.
    """
    options = LaunchOptions(**launch_options(arguments))
    with tempfile.TemporaryDirectory(prefix="lp_pipe-plan-") as folder:
        lines = describe_launch(program, arguments.mode, Path(folder), options)
    return [*lines, *_memory_lines(program, arguments.mode)]


def _memory_lines(program: Program, mode: str) -> Iterator[str]:
    if "torch" not in sys.modules:
        return  # so there is no pipeline
    from lp_pipe.measuring.memory_estimate import program_memory

    for label, estimate in program_memory(program, mode).items():
        yield f"memory of {label}, of each process, estimated:"
        yield from estimate.lines()


def count(arguments: argparse.Namespace) -> int:
    """Return the number of hosts on which the program will run.

    Raises:
        UsageError: the engine refuses its hosts or options.
    """
    if arguments.mode != "multi_host":
        return 1
    try:
        engine = LaunchOptions(**launch_options(arguments)).make_engine()
    except ValueError as error:
        raise UsageError(str(error)) from error
    return len(engine.hosts())


def at_most(arguments: argparse.Namespace) -> int:
    """Return the maximum number of hosts that --elastic gives."""
    return HostCount.parse(arguments.elastic).most


def _check_elastic(arguments: argparse.Namespace) -> None:
    if arguments.mode != "multi_host":
        raise UsageError("--elastic needs several hosts: add --mode=multi_host")
    if arguments.plan is not None or arguments.dry_run:
        raise UsageError(f"--elastic cannot be combined with {'--plan' if arguments.plan else '--dry-run'}")
    try:
        HostCount.parse(arguments.elastic)
    except ValueError as error:
        raise UsageError(f"--elastic: {error}") from error


def engine_options(arguments: argparse.Namespace) -> dict[str, str]:
    found = {
        name.removeprefix(_OPTION): value
        for name, value in vars(arguments).items()
        if name.startswith(_OPTION) and value is not None
    }
    for text in arguments.engine_option:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--engine-option={text}: write NAME=VALUE")
        found[name] = value
    return found
