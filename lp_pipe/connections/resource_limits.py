"""Errors that say that a limit of the system is reached, and advice about them."""

import contextlib
import errno
import os
import threading

_one_at_a_time = threading.Lock()  # channels that open at the same time must not use up the limit for each other

PROCESS_LIMIT_ADVICE = "this user, or this container, may not have more processes and threads (ulimit -u, pids.max)"
_ADVICE = {
    errno.EMFILE: "raise the limit of that process (ulimit -n)",
    errno.ENFILE: "this system may not have more open files (sysctl fs.file-max)",
}


def describe_error(error: BaseException) -> str:
    """Return the error's message, with advice if a higher limit would prevent it."""
    if is_out_of_threads(error):
        return f"{error}: {PROCESS_LIMIT_ADVICE}"
    advice = _ADVICE.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{error}; {advice}" if advice else str(error)


def check_descriptors(count: int) -> None:
    """Check that `count` descriptors can be opened, for libraries that end the process without them (gloo, gRPC).

    Raises:
        OSError: too few are left.
    """
    with _one_at_a_time, contextlib.ExitStack() as taken:
        for _ in range(0, count, 2):
            for end in os.pipe():
                taken.callback(os.close, end)


def describe_rejection(error: BaseException) -> str:
    """Return the reason that a listener gives a rightful peer that it cannot accept."""
    return f"it could not be accepted: {type(error).__name__}: {describe_error(error)}"


def is_limit_reached(error: BaseException) -> bool:
    """Return whether the error says that no more threads or file descriptors are available."""
    return is_out_of_threads(error) or (isinstance(error, OSError) and error.errno in _ADVICE)


def is_out_of_threads(error: BaseException) -> bool:
    """Return whether a thread could not be started; Python raises a bare RuntimeError then."""
    return type(error) is RuntimeError and str(error) == "can't start new thread"
