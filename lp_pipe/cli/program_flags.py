"""The program's own flags, which follow `--`: `lp_pipe launch file.py -- --num_actors=4`.

They are put into sys.argv. If a function makes the program, each of its parameters is a flag, too. Such a flag has the
type of the parameter's annotation, or else of its default: int, float, str, bool, Path, an Enum (by the names of its
members), a Literal, a union of one of these and None, or a list, tuple or set of these, separated by commas. Without
annotation and default, or with the default None, numbers and None are recognized, and any other value is text.
"""

import argparse
import ast
import collections.abc
import enum
import inspect
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from lp_pipe.cli.errors import UsageError, nearest

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_TRUTHS = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}
_COLLECTIONS: dict[Any, Callable[[list[Any]], Any]] = {
    **dict.fromkeys((list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection), list),
    tuple: tuple,
    set: set,
    frozenset: frozenset,
}
_Read = Callable[[str], Any]


class Argv(list[str]):
    """A sys.argv that records whether any code has read more than its first entry."""

    was_read = False

    def __getitem__(self, index: Any) -> Any:
        self.was_read |= index != 0
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[str]:
        self.was_read = True
        return super().__iter__()

    def __contains__(self, item: object) -> bool:
        self.was_read = True
        return super().__contains__(item)


def hand_over(file: str, flags: Sequence[str]) -> None:
    """Set sys.argv to [file, *flags]."""
    sys.argv = Argv([file, *flags])


def were_read() -> bool:
    """Return whether the target, or a module that it imports, has read the flags in sys.argv."""
    return bool(vars(sys.argv).get("was_read", False)) if isinstance(sys.argv, Argv) else True


@dataclass(frozen=True)
class Flags:
    """The flags of a command line: values by parameter, and the flags that match no parameter."""

    values: dict[str, Any]
    unknown: list[str]


class MakerFlags:
    """The flags of a function: its parameters, except for the first `num_given` and those that have an absl flag."""

    def __init__(
        self, target: str, function: Callable[..., Any], num_given: int = 0, absl_names: Collection[str] = ()
    ) -> None:
        self._target = target
        self._function = function
        parameters = _parameters(function)[num_given:]
        self._parameters = [one for one in parameters if one.name not in absl_names]
        self._of_absl = [one for one in parameters if one.name in absl_names]
        self._absl_names = sorted(absl_names)
        self._kinds = _annotations(function)

    @property
    def names(self) -> list[str]:
        """The names of the flags, without their dashes."""
        return [one.name for one in self._parameters]

    def parse(self, given: Sequence[str]) -> Flags:
        """Parse the flags that are parameters. A flag that is not given has no value: the function's default applies.

        Raises:
            UsageError: a value has the wrong type, or a parameter without a default is not given.
        """
        found, unknown = self._parser().parse_known_args(list(given))
        values = vars(found)
        for one in self._parameters:
            if one.name not in values and one.default is one.empty:
                raise UsageError(f"{self._target} needs -- --{one.name}=VALUE; {self._see()}")
        return Flags({name: self._collected(name, value) for name, value in values.items()}, unknown)

    def given_to_absl(self) -> dict[str, Any]:
        """Return the values of parameters that have an absl flag, if the flag is given or they have no default."""
        found = {one: sys.modules["absl.flags"].FLAGS[one.name] for one in self._of_absl}
        return {one.name: flag.value for one, flag in found.items() if flag.present or one.default is one.empty}

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Raise the error about flags that the program does not take.

        Raises:
            UsageError: always.
        """
        names = [f"--{name}" for name in [*self.names, *self._absl_names]]
        meant = nearest(unknown[0].partition("=")[0], names)
        takes = ", ".join(names)
        known = f"; it takes {takes}" if takes else "; it takes none"
        raise UsageError(f"{self._target} does not take {' '.join(unknown)}{meant or known}")

    def help(self) -> str:
        """Return the first line of the function's docstring and the list of flags."""
        return self._parser().format_help().rstrip()

    def _parser(self) -> argparse.ArgumentParser:
        about = (inspect.getdoc(self._function) or "").partition("\n")[0]
        parser = _FlagParser(self._target, about)
        for one in self._parameters:
            kind = self._kinds.get(one.name, _kind_of_default(one.default))
            names = [f"--{one.name}", *([f"--{one.name.replace('_', '-')}"] if "_" in one.name.strip("_") else [])]
            text = "needed" if one.default is one.empty else f"default: {_shown(one.default)}"
            options: dict[str, Any] = {"dest": one.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
            if _is_bool(kind):
                parser.add_argument(*names, nargs="?", const=True, type=_truth, metavar="true|false", **options)
                off: dict[str, Any] = {"dest": one.name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
                parser.add_argument(f"--no{one.name}", f"--no-{one.name}", action="store_false", **off)
            elif _item_of(kind) is not None:
                read = _listed(_reader(_item_of(kind)))
                parser.add_argument(*names, action="extend", type=read, metavar=f"{_named(kind)},…", **options)
            else:
                parser.add_argument(*names, type=_reader(kind), metavar=_named(kind), **options)
        return parser

    def _collected(self, name: str, value: Any) -> Any:
        """Convert a list that was read to the collection that the annotation says."""
        kind = _without_none(self._kinds.get(name))
        make = _COLLECTIONS.get(typing.get_origin(kind) or kind)
        return make(value) if make is not None and isinstance(value, list) else value

    def _see(self) -> str:
        return f"`lp_pipe launch {self._target} -- --help` lists its flags"


class _FlagParser(argparse.ArgumentParser):
    """A parser that raises wrong usage as UsageError."""

    def __init__(self, target: str, about: str) -> None:
        usage = f"lp_pipe launch {target} -- [flags]"
        super().__init__(usage=usage, description=about, add_help=False, allow_abbrev=False, conflict_handler="resolve")
        self._target = target

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self._target}: {message}; `lp_pipe launch {self._target} -- --help` lists its flags")


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # the function has no signature
        return []
    return [one for one in found if one.kind in _BY_NAME]


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of parameters; empty if one cannot be evaluated, such as a name under TYPE_CHECKING."""
    try:
        return typing.get_type_hints(function)
    except Exception:  # evaluating annotations runs user code
        return {}


def _kind_of_default(default: Any) -> Any:
    if default is None or default is inspect.Parameter.empty:
        return Any
    if isinstance(default, list | tuple | set) and default:
        return list[type(next(iter(default)))]  # type: ignore[misc]
    return type(default)


def _without_none(kind: Any) -> Any:
    """Return `int` for `int | None`; a union of several types is returned unchanged."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        rest = [one for one in typing.get_args(kind) if one is not types.NoneType]
        return rest[0] if len(rest) == 1 else kind
    return kind


def _is_bool(kind: Any) -> bool:
    return kind is bool


def _item_of(kind: Any) -> Any:
    """Return the type of a collection's items; None if `kind` is no collection."""
    kind = _without_none(kind)
    if (typing.get_origin(kind) or kind) not in _COLLECTIONS:
        return None
    return next(iter(typing.get_args(kind)), str)


def _reader(kind: Any) -> _Read:
    """Return a function from a flag's text to its value; argparse shows the function's name in errors."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _reader(arguments[0])
    if origin in (typing.Union, types.UnionType):
        readers = [_reader(one) for one in arguments if one is not types.NoneType]
        return _named_as(_first_of(readers, has_none=types.NoneType in arguments), kind)
    if _item_of(kind) is not None:
        return _named_as(_listed(_reader(_item_of(kind))), kind)
    if origin is typing.Literal:
        return _named_as(_chosen({str(one): one for one in arguments}), kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _named_as(_chosen({**{str(one.value): one for one in kind}, **dict(kind.__members__)}), kind)
    if kind is bool:
        return _truth
    if kind in (int, float, str) or (isinstance(kind, type) and issubclass(kind, pathlib.PurePath)):
        return _named_as(kind, kind)
    if kind in (Any, object):
        return _named_as(_first_of([int, float, str], has_none=True), Any)
    return _named_as(_literal, kind)


def _first_of(readers: Sequence[_Read], has_none: bool) -> _Read:
    def read(text: str) -> Any:
        if has_none and text.lower() == "none":
            return None
        for reader in readers[:-1]:
            try:
                return reader(text)
            except (ValueError, argparse.ArgumentTypeError):
                continue
        return readers[-1](text)

    return read


def _chosen(choices: dict[str, Any]) -> _Read:
    def read(text: str) -> Any:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(choices)}{nearest(text, choices)}")
        return choices[text]

    return read


def _listed(reader: _Read) -> _Read:
    def read(text: str) -> list[Any]:
        return [reader(item.strip()) for item in text.split(",")] if text else []

    return read


def _truth(text: str) -> bool:
    if text.lower() not in _TRUTHS:
        raise argparse.ArgumentTypeError(f"{text!r} must be true or false")
    return _TRUTHS[text.lower()]


def _literal(text: str) -> Any:
    """Read a value of another type, such as a dict, as a Python literal."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} must be a Python literal") from None


def _named_as(read: Any, kind: Any) -> _Read:
    def named(text: str) -> Any:
        return read(text)

    named.__name__ = _named(kind)
    return named


def _named(kind: Any) -> str:
    """Return a type's name for the help text, such as int or adam|sgd."""
    item = _item_of(kind)
    if item is not None:
        return _named(item)
    kind = _without_none(kind)
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "|".join(kind.__members__)
    return "value" if kind in (Any, object) else getattr(kind, "__name__", None) or str(kind)


def _shown(default: Any) -> str:
    if isinstance(default, enum.Enum):
        return default.name
    if isinstance(default, list | tuple) and default:
        return ",".join(map(str, default))
    return str(default) if default != "" else "''"
