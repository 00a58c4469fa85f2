"""A file that only ever grows, and begins anew when somebody has deleted it."""

import contextlib
import os
import shutil
from io import FileIO
from pathlib import Path


class AppendOnlyFile:
    """Opened when it is first written to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def opened(self) -> FileIO:
        """To write to its end.

        Raises:
            OSError: it cannot be made: its folder was deleted, or is read-only, ….
        """
        if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:
            self.close()  # else all that is written would be gone, without an error
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
        return self._file

    def close(self) -> None:
        """Idempotent; the next `opened` goes on behind what is there."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def write_atomically(path: str | Path, text: str) -> None:
    """Write it beside, then put it in the place of what was there: that stays where the disk is full.

    Only what is no file of its own (a link, a device, a pipe) is written to in place.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, aside)
        aside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()  # it is there where something was in the way
