"""Standard streams that were closed when this process was started (`python train.py >&-`, some daemons)."""

import os
import subprocess


def open_closed() -> None:
    """Open closed standard streams on /dev/null.

    Otherwise the next opened files would get their descriptors. Output would go to those files, or they would be closed
    in place of a stream.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # node processes need them as well
    os.close(descriptor)


def for_child(descriptor: int) -> int | None:
    """Return the argument for subprocess.Popen: inherit this stream, or /dev/null if the descriptor is another file."""
    try:
        return None if os.get_inheritable(descriptor) else subprocess.DEVNULL
    except OSError:  # closed
        return subprocess.DEVNULL
