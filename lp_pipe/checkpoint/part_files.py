"""Files of a checkpoint's part that the next checkpoint takes over, as long as they have not changed."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import NamedTuple

from lp_pipe.checkpoint.folder import finished_path


class PartFile(NamedTuple):
    """A file of a part. version: equal versions have equal contents; None: the contents are always new.

    contents: returns them; called only if the file must be written.
    """

    version: Hashable
    contents: Callable[[], bytes]


class _Written(NamedTuple):
    """A file that was written. identity: of the file on the disk, which changes with its contents."""

    version: Hashable
    sha256: str
    identity: tuple[int, int, int]


class PartFiles:
    """The files of a part that saves itself, for a state of which little changes between two checkpoints.

        def save_async(self, path):                     # of the part
            files = {f"block-{i}": PartFile(self.version[i], self.blocks[i].tobytes) for i in range(100)}
            return self.executor.submit(self.part_files.write, path, files)

    A file whose version is that of the checkpoint before becomes a hard link to it, with its remembered sha256. Where
    there is nothing to link to (the checkpoint before has failed or was deleted, the file system has no hard links),
    the file is written again. A linked file stays when older checkpoints are deleted. What was written before a restart
    of the process is not remembered: the first checkpoint after it writes all files.
    """

    def __init__(self) -> None:
        self._before: Path | None = None  # the part's folder in the checkpoint before
        self._written: dict[str, _Written] = {}

    def write(self, folder: Path, files: Mapping[str, PartFile]) -> dict[str, str]:
        """Write files, by name, into a new folder, or link them; return their sha256: the result of `save_async`.

        folder: as `save_async` gets it.

        Raises:
            OSError: for example, the disk is full.
        """
        folder.mkdir()
        written = {
            name: self._linked(folder, name, file) or _write(folder / name, file) for name, file in files.items()
        }
        self._before = finished_path(folder.parent) / folder.name
        self._written = written
        return {name: file.sha256 for name, file in written.items()}

    def _linked(self, folder: Path, name: str, file: PartFile) -> _Written | None:
        """Link a file to that of the checkpoint before; return None if it has another version or other contents."""
        known = self._written.get(name)
        if known is None or self._before is None or file.version is None or known.version != file.version:
            return None
        path = folder / name
        with contextlib.suppress(OSError):
            os.link(self._before / name, path)
            if _identity(path) == known.identity:
                return known
            path.unlink()  # damaged, or the checkpoint of another program
        return None


def _write(path: Path, file: PartFile) -> _Written:
    contents = file.contents()
    path.write_bytes(contents)
    return _Written(file.version, hashlib.sha256(contents).hexdigest(), _identity(path))


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
