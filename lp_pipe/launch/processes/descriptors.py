"""What nodes that are processes take of the file descriptors of the process that starts them."""

import os
import socket

from lp_pipe.connections.kernel_calls import most_descriptors
from lp_pipe.errors import LaunchError

_OF_NODE = 3  # two for what it prints, one for its stream
_OF_HOST = 8


def check_descriptors(nodes: int) -> None:
    """Nodes that cannot be let in later would wait for ever.

    Raises:
        LaunchError: this process may not have so many descriptors.
    """
    needed = _OF_NODE * nodes + _OF_HOST
    limit = most_descriptors()
    try:
        free = limit - len(os.listdir("/dev/fd"))
    except OSError:  # no /proc: a shortage will be an error of its own
        return
    if free < needed:
        who = "1 node needs" if nodes == 1 else f"{nodes} nodes need"
        raise LaunchError(
            f"{who} {needed} file descriptors in the process that launches (host "
            f"{socket.gethostname()}), and {max(free, 0)} of its {limit} are free: raise its limit (ulimit -n)"
        )
