"""Whether a folder is the same one for all who write to it: on several hosts each may have one of its own there."""

import socket
import time
from collections.abc import Mapping
from pathlib import Path

from lp_pipe.checkpoint.parts import saves_itself
from lp_pipe.errors import CheckpointError

_APPEARS_WITHIN_S = 5.0  # a network file system may show late what another host has made
_LOOK_EVERY_S = 0.1


def check_is_shared(aside: Path, parts: Mapping[str, object]) -> None:
    """That this node sees the folders of those parts that write one, as nodes of other hosts may.

    Raises:
        CheckpointError: it does not see one.
    """
    for name, part in parts.items():
        if saves_itself(part):
            check_is_here(aside / name, f"part {name!r}")


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
                "host have a folder of its own there? Save to a file system that all hosts of the program share"
            )
        time.sleep(_LOOK_EVERY_S)
