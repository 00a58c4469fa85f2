"""The file descriptors that the launching process needs for its node processes."""

import os
import socket

from lp_pipe.connections.kernel_calls import most_descriptors
from lp_pipe.errors import LaunchError

_OF_NODE = 3  # two for its output, one for its stream
_OF_HOST = 8


def check_descriptors(nodes: int) -> None:
    """Check the descriptors before the start: a node whose connection could not be accepted would wait for ever.

    Raises:
        LaunchError: this process may not open enough descriptors for so many nodes.
    """
    needed = _OF_NODE * nodes + _OF_HOST
    limit = most_descriptors()
    try:
        free = limit - len(os.listdir("/dev/fd"))
    except OSError:  # no /proc: a later shortage is reported where it occurs
        return
    if free < needed:
        who = "1 node needs" if nodes == 1 else f"{nodes} nodes need"
        raise LaunchError(
            f"{who} {needed} file descriptors in the launching process (host {socket.gethostname()}), but "
            f"only {max(free, 0)} of its {limit} are free: raise its limit (ulimit -n)"
        )
