"""Locks that a thread may already hold when a signal handler, `__del__` or trace function runs on top of it.

Code that runs in the middle of an interrupted critical section must not wait for the lock of that section, which only
the interrupted code below it on the same stack can release.
"""

from typing import Any

from lp_pipe.private_python import is_held_here


def release_if_held_here(lock: Any) -> None:
    """Release an RLock that an exception of a signal handler has left locked, between two bytecodes."""
    while is_held_here(lock):
        lock.release()
