"""Something done in a forked process."""

import os
from collections.abc import Callable


def holds_in_a_fork(check: Callable[[], bool]) -> bool:
    """Return whether `check` holds in a process that is forked now, and then ends."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0) == (child, 0)
    status = 1
    try:
        status = 0 if check() else 1
    finally:
        os._exit(status)
