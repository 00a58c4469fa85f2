"""Reading and writing of files that people edit: each error names the file and the field."""

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lp_pipe.errors import PartitionError
from lp_pipe.telemetry.file_writing import write_atomically

_LARGEST = 1e60  # beyond all seconds and bytes


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        PartitionError: it cannot be read, or holds something else.
    """
    return _read(path, "JSON", json.loads)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the table in a TOML file.

    Raises:
        PartitionError: it cannot be read.
    """
    return _read(path, "TOML", tomllib.loads)


def write_json(path: str | Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file that people can read.

    Raises:
        PartitionError: the file cannot be written.
    """
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file.

    Raises:
        PartitionError: it cannot be written; an older one stays as it was.
    """
    try:
        write_atomically(path, text)
    except OSError as error:
        raise PartitionError(f"cannot write {path}: {error.strerror}") from error


def read_text(path: str | Path) -> str:
    """Read a text file.

    Raises:
        PartitionError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PartitionError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PartitionError(f"cannot read {path}: it is not UTF-8 text ({error})") from error


@contextmanager
def in_file(path: str | Path, what: str) -> Iterator[None]:
    """Name the file in errors about the `what` that is made in the body.

    Raises:
        PartitionError: that of the body, with the file's name in the place of "what: ".
    """
    try:
        yield
    except PartitionError as error:
        raise PartitionError(f"{path}: {str(error).removeprefix(f'{what}: ')}") from error


def check_keys(table: Any, *, required: Sequence[str], optional: Sequence[str] = (), where: str) -> None:
    """Refuse a table that lacks a required key or has an unknown one.

    Raises:
        PartitionError: names the key.
    """
    if not isinstance(table, Mapping):
        raise PartitionError(f"{where}: must be a table with {', '.join(required)}, not {table!r}")
    for key in required:
        if key not in table:
            raise PartitionError(f"{where}: {key} is missing")
    known = {*required, *optional}
    for key in table:
        if key not in known:
            raise PartitionError(f"{where}: unknown key {key!r}: use {', '.join([*required, *optional])}")


def checked_number(value: Any, where: str, *, above_zero: bool = False) -> float:
    """Return the number, if sums and quotients of it stay finite.

    Raises:
        PartitionError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise PartitionError(f"{where}: must be a finite number, not {value!r}")
    if value < 0 or (above_zero and not value):
        raise PartitionError(f"{where}: must be {'above' if above_zero else 'at least'} 0, not {value!r}")
    if value > _LARGEST or (above_zero and value < 1 / _LARGEST):
        limit = f"most {_LARGEST:g}" if value > _LARGEST else f"least {1 / _LARGEST:g}"
        raise PartitionError(f"{where}: {value!r} is too {'large' if value > _LARGEST else 'small'}: use at {limit}")
    return value


def checked_count(value: Any, where: str) -> int:
    """Return the whole number, at least 1.

    Raises:
        PartitionError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PartitionError(f"{where}: must be a whole number of at least 1, not {value!r}")
    return value


def toml_string(text: str) -> str:
    """Return the text quoted for TOML, which quotes as JSON does but for one control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that is too large for a float
        return False


def _read(path: str | Path, kind: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    text = read_text(path)
    try:
        value = parse(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested thousands deep
        raise PartitionError(f"{path}: not {kind}: {error}") from error
    if not isinstance(value, dict):
        raise PartitionError(f"{path}: must hold one {kind} object, not {type(value).__name__}")
    return value
