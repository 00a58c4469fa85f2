"""The example programs' data: the source files of the running Python's standard library."""

import hashlib
import sysconfig
from pathlib import Path

_ROOT = Path(sysconfig.get_path("stdlib"))
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


def standard_library(max_files: int) -> list[Path]:
    """Return up to `max_files` of its .py files, sampled and ordered by a hash of their paths."""
    paths = [path for path in _ROOT.rglob("*.py") if not _SKIPPED_FOLDERS & set(path.relative_to(_ROOT).parts)]
    return sorted(paths, key=lambda path: _digest(short_name(path)))[:max_files]


def short_name(path: Path) -> str:
    """Return the path below the standard library's folder, with slashes."""
    return path.relative_to(_ROOT).as_posix()


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
