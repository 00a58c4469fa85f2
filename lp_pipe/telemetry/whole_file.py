"""A file that is written whole or not at all."""

import contextlib
import os
import shutil
from pathlib import Path


def write_whole(path: str | Path, text: str) -> None:
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
