"""A private temporary folder, so that files that a test leaves are found, whatever other processes do."""

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lp_pipe.connections.socket_dir import fits

_PREFIX = "lpt-"
# Folders that libraries make once per process and use until its end: multiprocessing's, and caches of compilers.
_LIVE_AS_LONG_AS_THE_PROCESS = ("pymp-", "torchinductor_", "torch_extensions", "numba")

_made: Path | None = None


@contextlib.contextmanager
def private_temp_dir() -> Iterator[None]:
    """Put temporary files of this process, and of processes that the body starts, into a private folder."""
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(_folder())
    try:
        yield
    finally:
        tempfile.tempdir = before
        if variable is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = variable


def entries() -> set[str]:
    """Return the names in that folder that should not stay."""
    return {entry.name for entry in _folder().iterdir() if not entry.name.startswith(_LIVE_AS_LONG_AS_THE_PROCESS)}


def _folder() -> Path:
    """Return the folder, which is kept until the process ends: a test may restore a patched `tempfile` to it late.

    A new folder is made only if a test has removed it, together with the usual temporary folder.
    """
    global _made
    if _made is None or not _made.is_dir():
        usual = tempfile.gettempdir()
        _made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=usual if fits(f"{usual}/{_PREFIX}12345678") else "/tmp"))
        atexit.register(_remove, _made, os.getpid())
    return _made


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)
