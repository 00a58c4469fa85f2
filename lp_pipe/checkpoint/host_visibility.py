"""Check that a folder has all files that the hosts wrote to it: it may be a different folder on each host."""

import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from lp_pipe.checkpoint.folder import deleted
from lp_pipe.errors import CheckpointError

_APPEARS_WITHIN_S = 5.0  # a network file system may show another host's file late
_LOOK_EVERY_S = 0.1


def check_is_shared(aside: Path, written: Mapping[str, Collection[str]]) -> None:
    """Check that this host sees what all parts have written, which may have happened on other hosts.

    written: by name of a part, its files and folders.

    Raises:
        CheckpointError: this host does not see one of them.
        FileNotFoundError: the folder was deleted.
    """
    for name, files in written.items():
        for file in files:
            if not aside.exists():
                raise deleted(aside)
            check_is_here(aside / file, f"part {name!r}")


def check_is_here(path: Path, maker: str) -> None:
    """Check that this host sees the file or folder that `maker` has just made; wait up to 5 s for it.

    Raises:
        CheckpointError: it does not, so what is saved there could not be loaded again.
    """
    deadline = time.monotonic() + _APPEARS_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"host {socket.gethostname()} does not see {path.absolute()}, which {maker} has just written: save to "
                "a file system that all hosts of the program share (or has another program, which saves in the same "
                "folder, deleted it?)"
            )
        time.sleep(_LOOK_EVERY_S)
