"""Flags of the ready-made programs: the fields of a dataclass."""

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

OptionsT = TypeVar("OptionsT")


def option(default: Any, help: str, *, choices: Sequence[str] | None = None, at_least: int | None = None) -> Any:
    """Return a field of an options dataclass; the type of its default is the flag's type."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "at_least": at_least})


def parse_options(options: type[OptionsT], program: str) -> OptionsT:
    """Read the flags after `--`, which `lp_pipe launch` puts into sys.argv.

    A wrong flag ends the process with status 2 and an error message, --help with status 0 and a list of flags.
    """
    parser = argparse.ArgumentParser(
        prog=f"lp_pipe launch {program} --",
        description=options.__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        parser.add_argument(
            f"--{field.name}",
            default=field.default,
            type=_reader(type(field.default), field.metadata["at_least"]),
            choices=field.metadata["choices"],
            metavar=None if field.metadata["choices"] else type(field.default).__name__.upper(),
            help=field.metadata["help"],
        )
    return options(**vars(parser.parse_args()))


def _reader(kind: type, at_least: int | None) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = kind(text)
        if at_least is not None and value < at_least:
            raise argparse.ArgumentTypeError(f"{text} is below {at_least}, the minimum")
        return value

    read.__name__ = kind.__name__  # argparse says "invalid int value: 'x'"
    return read


def require(module: str, package: str) -> ModuleType:
    """Import a module that only an example needs.

    Raises:
        ModuleNotFoundError: the module is missing; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # the module is installed, but one of its own imports is missing
        message = f"this program needs {package}: pip install 'lp_pipe[examples]', or pip install {package}"
        raise ModuleNotFoundError(message, name=error.name) from error
