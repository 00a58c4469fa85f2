"""Reading files that people write: whatever is wrong is one error with the file and the field."""

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lp_pipe.errors import PartitionError
from lp_pipe.telemetry.whole_file import write_whole

_LARGEST = 1e60  # beyond all seconds and bytes


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        PartitionError: it cannot be read, or holds something else.
    """
    return _read(path, "JSON", json.loads)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table in a TOML file.

    Raises:
        PartitionError: it cannot be read.
    """
    return _read(path, "TOML", tomllib.loads)


def write_json(path: str | Path, value: Mapping[str, Any]) -> None:
    """Write it for people to read.

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
        write_whole(path, text)
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
        raise PartitionError(f"cannot read {path}: it is no text ({error})") from error


@contextmanager
def in_file(path: str | Path, what: str) -> Iterator[None]:
    """What is wrong with the `what` that is made in the body is wrong in that file.

    Raises:
        PartitionError: that of the body, with the file's name in the place of "what: ".
    """
    try:
        yield
    except PartitionError as error:
        raise PartitionError(f"{path}: {str(error).removeprefix(f'{what}: ')}") from error


def check_keys(table: Any, *, required: Sequence[str], optional: Sequence[str] = (), where: str) -> None:
    """Refuse what is missing and what nobody knows.

    Raises:
        PartitionError: names the key.
    """
    if not isinstance(table, Mapping):
        raise PartitionError(f"{where}: a table with {', '.join(required)} is needed, not {table!r}")
    for key in required:
        if key not in table:
            raise PartitionError(f"{where}: {key} is missing")
    known = {*required, *optional}
    for key in table:
        if key not in known:
            raise PartitionError(f"{where}: {key} is not known here (known: {', '.join([*required, *optional])})")


def checked_number(value: Any, where: str, *, above_zero: bool = False) -> float:
    """The number, finite and not negative, and not so large or close to 0 that sums or quotients would overflow.

    Raises:
        PartitionError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise PartitionError(f"{where}: {value!r} is no finite number")
    if value < 0 or (above_zero and not value):
        raise PartitionError(f"{where}: {value!r} must be {'above' if above_zero else 'at least'} 0")
    if value > _LARGEST or (above_zero and value < 1 / _LARGEST):
        raise PartitionError(f"{where}: {value!r} is too {'large' if value > _LARGEST else 'small'} to count with")
    return value


def checked_count(value: Any, where: str) -> int:
    """The whole number, at least 1.

    Raises:
        PartitionError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PartitionError(f"{where}: {value!r} must be a whole number of at least 1")
    return value


def toml_string(text: str) -> str:
    """Quoted for TOML, which JSON's strings are but for one control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can be
        return False


def _read(path: str | Path, kind: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    text = read_text(path)
    try:
        value = parse(text)
    except (ValueError, RecursionError) as error:  # the latter of what is nested thousands deep
        raise PartitionError(f"{path}: not {kind}: {error}") from error
    if not isinstance(value, dict):
        raise PartitionError(f"{path}: a {kind} object is needed, not {type(value).__name__}")
    return value
