"""The command `lp_pipe`: read the command line, run one command, return the exit status."""

import argparse
import errno
import importlib.metadata
import platform
import signal
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from lp_pipe.cli import streams
from lp_pipe.cli.errors import DONE, INTERRUPTED, NOT_LAUNCHED, CommandError, UsageError, nearest, status_of
from lp_pipe.private_python import options_of

# Each is a module of this folder, which is imported only when its command runs: some imports are slow. It has the texts
# HELP, DESCRIPTION, USAGE and EPILOG, a function that adds the options, and one that runs the command.
COMMANDS = (
    *("launch", "graph", "schedule", "profile", "partition", "checkpoint", "experiment"),
    *("ui", "status", "logs", "stacks", "trace", "plot", "stop", "attach", "ps", "runs", "clean", "doctor", "agent"),
    "completion",
)
_WITH_PROGRAM_FLAGS = ("launch", "graph", "profile", "experiment")
_LIKE_AN_OPTION = 0.75  # --mdoe is similar to --mode, but a program's own --stages is not similar to --hosts
_EXAMPLES = """\
examples:
  lp_pipe launch examples/char_gpt.py                    start a program, one process a node
  lp_pipe launch examples/char_gpt.py -- --stages=3      pass flags to the program
  lp_pipe graph examples/char_gpt.py -o graph.svg        draw its graph
  lp_pipe schedule 1f1b --stages=4 --microbatches=8      draw a pipeline's schedule
  lp_pipe partition profile.json topology.toml           decide where to cut a model
  lp_pipe status                                         show its nodes, from another terminal

`lp_pipe COMMAND --help` explains a command.
"""
_READER_GONE = INTERRUPTED + signal.SIGPIPE
_CANNOT_PRINT = (errno.ENOSPC, errno.EIO)  # a full disk; a terminal that was closed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return the exit status."""
    streams.prepare()
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except CommandError as error:
        streams.say(f"lp_pipe: {error}")
        return error.status
    except KeyboardInterrupt as error:
        streams.say("lp_pipe: interrupted")
        return status_of(error)
    except BrokenPipeError:  # such as `lp_pipe graph ... | head`
        return _READER_GONE
    except OSError as error:
        if error.errno not in _CANNOT_PRINT or error.filename is not None:
            raise
        streams.say(f"lp_pipe: cannot write to stdout: {error.strerror}")
        return NOT_LAUNCHED
    finally:
        streams.drop_unwritten()


def _run(given: list[str]) -> int:
    own, program_flags = _split(given)
    if own[:2] == ["experiment", "create"]:  # an experiment is an ordinary program
        own[:2] = ["launch"]
    if not given:
        own = ["--help"]
    arguments = _parse(own, program_flags)
    arguments.given = given
    status: int = arguments.run(arguments, program_flags)
    if status == DONE:  # another status matters more than an error of this flush
        sys.stdout.flush()
    return status


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the command's own arguments, and the program's flags, which follow the first `--`."""
    if "--" not in argv:
        return argv, []
    place = argv.index("--")
    return argv[:place], argv[place + 1 :]


def _parse(own: list[str], program_flags: list[str]) -> argparse.Namespace:
    command = own[0] if own and not own[0].startswith("-") else None
    if command and command not in COMMANDS:
        raise UsageError(f"no command {command!r}{nearest(command, COMMANDS)} (commands: {', '.join(COMMANDS)})")
    parser, options = make_parser([command] if command else COMMANDS)
    arguments, unknown = parser.parse_known_args(own)
    if unknown:
        raise UsageError(_unknown(command, unknown, options))
    if program_flags and command not in _WITH_PROGRAM_FLAGS:
        raise UsageError(f"`lp_pipe {command}` takes no program flags: leave out -- {' '.join(program_flags)}")
    return arguments


def _unknown(command: str | None, unknown: Sequence[str], options: Sequence[str]) -> str:
    """Return the message about arguments that the command does not have."""
    flags = " ".join(unknown)
    if command is None:
        return f"{unknown[0]} is before the command: put options after it, as in lp_pipe launch TARGET --json"
    if unknown[0] == "-m" and command in _WITH_PROGRAM_FLAGS:
        return f"give a module by its name alone, without -m: lp_pipe {command} package.module"
    meant = nearest(unknown[0].partition("=")[0], options, _LIKE_AN_OPTION)
    if command in _WITH_PROGRAM_FLAGS:
        hint = f"flags of the program itself come after `--`: -- {flags}"
    else:
        hint = f"see `lp_pipe {command} --help`"
    return f"unknown arguments: {flags}{meant or ';'} {hint}"


class _Help(argparse.HelpFormatter):
    """A formatter that keeps the lines of examples, and does not break options such as --dry-run."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n  " in text else super()._fill_text(text, width, indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class _CommandParser(argparse.ArgumentParser):
    """A parser that reports wrong usage as one line, without the synopsis."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=_Help)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def make_parser(described: Sequence[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    """Return a parser for these commands, and the names of all their options."""
    parser = _CommandParser(
        prog="lp_pipe",
        description="Launch program graphs: nodes in threads, in processes, connected by calls.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in described:
        module = import_module(f"lp_pipe.cli.{command}")
        texts: dict[str, Any] = {
            name: getattr(module, name.upper(), None) for name in ("help", "description", "usage", "epilog")
        }
        its_parser = commands.add_parser(command, allow_abbrev=False, **texts)
        module.add_arguments(its_parser)
        its_parser.set_defaults(run=module.run_command)
    return parser, [option for command in commands.choices.values() for option in options_of(command)]


def _version() -> str:
    try:
        version = importlib.metadata.version("lp_pipe")
    except importlib.metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
        version = "not installed"
    return f"lp_pipe {version} (Python {platform.python_version()})"
