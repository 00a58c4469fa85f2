"""The part of `lp_pipe launch` that is about several hosts: its options, and the plan of a --dry-run."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from lp_pipe.cli.errors import UsageError
from lp_pipe.connections.tcp_carriers import TRANSPORTS
from lp_pipe.launch.dry_run import planned
from lp_pipe.launch.elastic import HostCount
from lp_pipe.launch.engines import BUILT_IN, engine_class, make_engine
from lp_pipe.program import Program

_OPTION = "option_"


def add_arguments(parser: argparse.ArgumentParser, needed: str = "--mode=multi_host") -> None:
    """Describe them, and what goes with them; also those of the engines that we bring."""
    group = parser.add_argument_group(f"several hosts ({needed})")
    group.add_argument(
        "--engine", metavar="NAME", help=f"who starts an agent on each host: {', '.join(BUILT_IN)} (default: local)"
    )
    group.add_argument("--hosts", metavar="H1,H2:gpus=4|FILE", help="which hosts; local, slurm, ray: how many")
    group.add_argument("--listen", metavar="ADDRESS", help="by which the hosts reach this one (default: found out)")
    group.add_argument("--interface", metavar="NAME", help="by which the hosts reach each other (default: found out)")
    group.add_argument(
        "--transport",
        choices=list(TRANSPORTS),
        help="what carries all traffic between hosts (default: auto: tls)",
    )
    group.add_argument("--sync", metavar="DIR", help="give the hosts this folder of sources; only changes travel")
    group.add_argument("--join-timeout", type=float, metavar="S", help="seconds for all hosts to join (default: 60)")
    group.add_argument(
        "--host-timeout", type=float, metavar="S", help="a host that is silent for so long is lost (default: 7)"
    )
    group.add_argument(
        "--engine-option", action="append", default=[], metavar="NAME=VALUE", help="of an engine that is not ours"
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
    """The options that only a launch has."""
    parser.add_argument(
        "--elastic",
        metavar="MIN:MAX",
        help="so many hosts: TARGET is a function of their number, called again when one is lost or comes back",
    )
    parser.add_argument("--dry-run", action="store_true", help="start no node: print which would run where, and end")


def launch_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `launch` is to be given beside the rest.

    Raises:
        UsageError: options of several hosts in another mode, or an engine that does not exist.
    """
    given = {
        "engine": arguments.engine,
        "hosts": arguments.hosts,
        "listen": arguments.listen,
        "interface": arguments.interface,
        "transport": arguments.transport,
        "sync": arguments.sync,
        "join_timeout": arguments.join_timeout,
        "host_timeout": arguments.host_timeout,
        "engine_options": engine_options(arguments),
    }
    options = {name: value for name, value in given.items() if value not in (None, "", {})}
    if vars(arguments).get("elastic"):
        _check_elastic(arguments)
    if options and arguments.mode != "multi_host":
        flag = f"--{next(iter(options)).replace('_', '-')}"
        raise UsageError(f"{flag} is for several hosts: add --mode=multi_host")
    if arguments.engine:
        try:
            engine_class(arguments.engine)
        except ValueError as error:
            raise UsageError(f"--engine={arguments.engine}: {error}") from error
    return options


def plan_lines(program: Program, arguments: argparse.Namespace) -> list[str]:
    """Which node would run where, for people.

    Raises:
        LaunchError, ValueError: the hosts do not join, or do not have what the program wants.
    """
    options = launch_options(arguments)
    with tempfile.TemporaryDirectory(prefix="lp_pipe-plan-") as folder:
        return planned(program, arguments.mode, Path(folder), **options)


def count(arguments: argparse.Namespace) -> int:
    """On how many hosts the program will run.

    Raises:
        UsageError: the engine cannot read its hosts or options.
    """
    if arguments.mode != "multi_host":
        return 1
    try:
        engine = make_engine(arguments.engine or "local", arguments.hosts or "", engine_options(arguments))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return len(engine.hosts())


def at_most(arguments: argparse.Namespace) -> int:
    """Of how many hosts --elastic speaks."""
    return HostCount.parse(arguments.elastic).most


def _check_elastic(arguments: argparse.Namespace) -> None:
    if arguments.mode != "multi_host":
        raise UsageError("--elastic is for several hosts: add --mode=multi_host")
    if arguments.plan is not None or arguments.dry_run:
        raise UsageError(f"--elastic and {'--plan' if arguments.plan else '--dry-run'} do not go together")
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
