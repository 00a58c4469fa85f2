"""What a process may have no more of, and what to do about it."""

import contextlib
import errno
import os
import threading

_one_at_a_time = threading.Lock()  # many channels that begin at once are not to take the limit from each other

NO_MORE_PROCESSES = "this user, or this container, may not have more processes and threads (ulimit -u, pids.max)"
_ADVICE = {
    errno.EMFILE: "raise the limit of that process (ulimit -n)",
    errno.ENFILE: "this system may not have more open files (sysctl fs.file-max)",
}


def told(error: BaseException) -> str:
    """The error in words; for one that a higher limit mends, which."""
    if is_of_threads(error):
        return f"{error}: {NO_MORE_PROCESSES}"
    advice = _ADVICE.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{error}; {advice}" if advice else str(error)


def check_descriptors(count: int) -> None:
    """For what ends this very process where it finds none, as gloo and gRPC do.

    Raises:
        OSError: there are not so many left.
    """
    with _one_at_a_time, contextlib.ExitStack() as taken:
        for _ in range(0, count, 2):
            for end in os.pipe():
                taken.callback(os.close, end)


def not_taken_in(error: BaseException) -> str:
    """Why a listener has sent somebody away who had come rightly."""
    return f"it could not be taken in: {type(error).__name__}: {told(error)}"


def is_shortage(error: BaseException) -> bool:
    """Whether it says that there are no more threads or file descriptors to be had."""
    return is_of_threads(error) or (isinstance(error, OSError) and error.errno in _ADVICE)


def is_of_threads(error: BaseException) -> bool:
    """Python says so with a bare RuntimeError."""
    return type(error) is RuntimeError and str(error) == "can't start new thread"
