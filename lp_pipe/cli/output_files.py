"""The files that commands write."""

from collections.abc import Iterable
from pathlib import Path

from lp_pipe.cli.errors import UsageError
from lp_pipe.telemetry.file_writing import write_atomically


def output_path(text: str, suffixes: Iterable[str]) -> Path:
    """The value of -o, for a file whose name says what is written.

    Raises:
        UsageError: the name has another ending.
    """
    if Path(text).suffix not in suffixes:
        raise UsageError(f"-o {text}: the file's name must end in one of {', '.join(suffixes)}")
    return Path(text)


def write_file(path: Path, text: str) -> None:
    """Write it.

    Raises:
        UsageError: it cannot be written; an older one stays as it was.
    """
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
