"""A temporary folder of a test's own, so that what it leaves behind is found, whatever runs beside it."""

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lp_pipe.launch.socket_dir import fits

_PREFIX = "lpt-"
# Made once per process, used until its end: multiprocessing's own folder, compilers' caches.
_LIVE_AS_LONG_AS_THE_PROCESS = ("pymp-", "torchinductor_", "torch_extensions", "tmp_triton", "numba")


@contextlib.contextmanager
def private_temp_dir() -> Iterator[Path]:
    """Let this process, and processes that it starts, put temporary files into a folder that goes at the end."""
    usual = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=usual if fits(f"{usual}/{_PREFIX}12345678") else "/tmp"))
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    try:
        yield folder
    finally:
        tempfile.tempdir = before
        if variable is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = variable
        _remove(folder)


def left_in(folder: Path) -> list[str]:
    """What somebody should have removed."""
    return sorted(entry.name for entry in folder.iterdir() if not _is_kept(entry))


def _remove(folder: Path) -> None:
    if any(map(_is_kept, folder.iterdir())):
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _is_kept(entry: Path) -> bool:
    return entry.name.startswith(_LIVE_AS_LONG_AS_THE_PROCESS)
