"""Two ways to write a file: append to it for as long as a run lasts, or replace it as a whole."""

import contextlib
import os
import shutil
from io import FileIO
from pathlib import Path


class AppendOnlyFile:
    """A file that only grows. It is created by the first write, and again if it was deleted meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def opened(self) -> FileIO:
        """Return the open file; each write goes to its end.

        Raises:
            OSError: the file cannot be created; for example, its folder was deleted or is read-only.
        """
        if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:
            self.close()  # writes to a deleted file succeed, but their data is lost
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
        return self._file

    def close(self) -> None:
        """Close the file; idempotent. The next `opened` appends to what is there."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def write_atomically(path: str | Path, contents: str | bytes | memoryview) -> None:
    """Write a temporary file in the same folder, then rename it to `path`; after an error the old file is unchanged.

    A symbolic link, a device or a pipe is written to in place.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    data = contents.encode() if isinstance(contents, str) else contents
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(data)
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(data)
        if path.exists():
            shutil.copymode(path, aside)
        aside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()  # exists only after an error
