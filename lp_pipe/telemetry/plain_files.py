"""Open files of a run's folder for reading without following links: another user's folder could link to any file."""

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file; neither the file nor its folder may be a link.

    Raises:
        OSError: there is no such file, or it is a link, a pipe or a device.
    """
    with contextlib.ExitStack() as stack:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, folder)
        file = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(file, "rb")


def read_plain(path: Path, limit: int = 64 << 20) -> bytes:
    """Return what `open_plain` reads, at most `limit` bytes of it; empty if the file cannot be opened."""
    with contextlib.suppress(OSError), open_plain(path) as file:
        return file.read(limit)
    return b""
