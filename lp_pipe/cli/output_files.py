"""Files that commands write, given by -o."""

from collections.abc import Iterable
from pathlib import Path

from lp_pipe.cli.errors import UsageError
from lp_pipe.telemetry.file_writing import write_atomically


def output_path(text: str, suffixes: Iterable[str]) -> Path:
    """Return the path that -o gives; the ending of its name selects the format.

    Raises:
        UsageError: the name has none of the endings `suffixes`.
    """
    if Path(text).suffix not in suffixes:
        raise UsageError(f"-o {text}: the file's name must end in one of {', '.join(suffixes)}")
    return Path(text)


def write_file(path: Path, text: str) -> None:
    """Write `text` to the file.

    Raises:
        UsageError: the file cannot be written; an existing file is unchanged.
    """
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
