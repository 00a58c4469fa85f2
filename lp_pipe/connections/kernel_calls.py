"""System calls that Python offers, and that the running kernel may refuse.

An old kernel does not know them (ENOSYS); a container's profile may forbid them (EPERM). Each is tried once per
process, when it is first needed; a slower way replaces a call that is refused.
"""

import contextlib
import errno
import os
import resource
import select
import selectors
import sys
from collections.abc import Callable
from functools import cache

# These errors say nothing about the call: later there may be descriptors and memory again.
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@cache
def has_memfd() -> bool:
    """Return whether memory can be shared as an anonymous file."""
    return _works(lambda: os.close(os.memfd_create("lp_pipe-probe", os.MFD_CLOEXEC)))


@cache
def has_epoll() -> bool:
    """Return whether one thread can wait for many descriptors, and be woken through an eventfd."""
    return _works(_try_epoll)


@cache
def has_pidfd() -> bool:
    """Return whether the end of a process can be waited for without a signal."""
    return _works(lambda: os.close(os.pidfd_open(os.getpid())))


def new_selector() -> selectors.BaseSelector:
    """Return a selector that works here; `selectors.DefaultSelector` may be one that does not."""
    return selectors.DefaultSelector() if has_epoll() else selectors.PollSelector()


def usable_cores() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may run on."""
    with contextlib.suppress(AttributeError, OSError):  # not on macOS, or refused
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def most_descriptors() -> int:
    """Return how many file descriptors this process may have open."""
    try:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except OSError:
        return sys.maxsize
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _try_epoll() -> None:
    event = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    with contextlib.closing(select.epoll()) as epoll:
        try:
            epoll.register(event, select.EPOLLIN)
            epoll.poll(0)
        finally:
            os.close(event)


def _works(call: Callable[[], None]) -> bool:
    try:
        call()
    except AttributeError:  # not on this system, such as macOS
        return False
    except OSError as error:
        return error.errno in _SHORTAGES
    return True
