"""A temporary folder of this process's own, so that what tests leave behind is found, whatever runs beside them."""

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lp_pipe.launch.processes.socket_dir import fits

_PREFIX = "lpt-"
# Made once per process, used until its end: multiprocessing's own folder, compilers' caches.
_LIVE_AS_LONG_AS_THE_PROCESS = ("pymp-", "torchinductor_", "torch_extensions", "numba")

_made: Path | None = None


@contextlib.contextmanager
def private_temp_dir() -> Iterator[None]:
    """Temporary files of this process, and of processes that it starts in the body, go to a folder of their own."""
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
    """What is in that folder now and should not stay."""
    return {entry.name for entry in _folder().iterdir() if not entry.name.startswith(_LIVE_AS_LONG_AS_THE_PROCESS)}


def _folder() -> Path:
    """One until the process ends: a test's own patch of `tempfile` may be undone later, and must find it there.

    Only if a test has removed it, with the folder that was the usual one at first, another one is made.
    """
    global _made
    if _made is None or not _made.is_dir():
        usual = tempfile.gettempdir()
        _made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=usual if fits(f"{usual}/{_PREFIX}12345678") else "/tmp"))
        atexit.register(_remove, _made, os.getpid())
    return _made


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork of it
        shutil.rmtree(folder, ignore_errors=True)
