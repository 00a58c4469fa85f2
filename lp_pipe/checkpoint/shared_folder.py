"""Whether a folder has what all wrote to it: each host may have one of its own there, and others may delete in it."""

import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from lp_pipe.checkpoint.folder import deleted
from lp_pipe.errors import CheckpointError

_APPEARS_WITHIN_S = 5.0  # a network file system may show late what another host has made
_LOOK_EVERY_S = 0.1


def check_is_shared(aside: Path, written: Mapping[str, Collection[str]]) -> None:
    """That this node sees what parts have written, as nodes of other hosts may.

    written: by name of a part, files and folders of its own.

    Raises:
        CheckpointError: it does not see one.
        FileNotFoundError: all of it is gone.
    """
    for name, files in written.items():
        for file in files:
            if not aside.exists():
                raise deleted(aside)
            check_is_here(aside / file, f"part {name!r}")


def check_is_here(path: Path, maker: str) -> None:
    """That this host sees what `maker` has just made at this path.

    Raises:
        CheckpointError: it does not, so what is saved there could not be loaded again.
    """
    deadline = time.monotonic() + _APPEARS_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"host {socket.gethostname()} does not find what {maker} has just made, {path.absolute()}: does each "
                "host have a folder of its own there? Save to a file system that all hosts of the program share (or "
                "has another program deleted it, that saves in the same folder?)"
            )
        time.sleep(_LOOK_EVERY_S)
