"""Open files of a run's folder for reading without following links: another user's folder could link to any file."""

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO


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


class AppendedLines:
    """The finished lines of a file of JSON objects that grows, each once. start: the offset of the first one."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self._path = path
        self._place = start

    def new(self) -> list[dict[str, Any]]:
        """Return the JSON objects of the lines since the last call."""
        try:
            if self._path.lstat().st_size <= self._place:
                return []
            with open_plain(self._path) as file:
                file.seek(self._place)
                data = file.read()
        except OSError:
            return []
        whole = data.rfind(b"\n") + 1
        self._place += whole
        found = []
        for line in data[:whole].splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return [one for one in found if isinstance(one, dict)]
