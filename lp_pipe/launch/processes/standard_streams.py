"""Standard streams that whoever started this process has closed (`python train.py >&-`, some daemons)."""

import os
import subprocess


def open_closed() -> None:
    """Have what is written to them go nowhere.

    Left closed, their descriptors would be those of the next files that are opened, and a process's output would go
    there, or those files be closed in its place.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # the processes of nodes need theirs as well
    os.close(descriptor)


def for_child(descriptor: int) -> int | None:
    """What subprocess.Popen takes: the child has the same one, or none where this process has another file there."""
    try:
        return None if os.get_inheritable(descriptor) else subprocess.DEVNULL
    except OSError:  # closed
        return subprocess.DEVNULL
