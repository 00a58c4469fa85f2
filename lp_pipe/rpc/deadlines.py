"""The time limits of calls."""

from datetime import timedelta

from lp_pipe.connections.io_thread import LONGEST_S
from lp_pipe.errors import DeadlineExceeded


def too_late(peer: str, method: str, call_timeout_s: float | None) -> DeadlineExceeded:
    """Return the error with which a call ends at its deadline."""
    return DeadlineExceeded(f"{peer}.{method}(): no reply within call_timeout = {call_timeout_s} s")


def seconds(timeout: float | timedelta | None) -> float | None:
    """Return a call's limit in seconds; None for no limit, or for one longer than the system can wait.

    Raises:
        TypeError: it is a text.
        ValueError: it is negative.
    """
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, str):
        raise TypeError(f"call_timeout must be a number of seconds or a timedelta, got {timeout!r}")
    if timeout is not None and timeout < 0:
        raise ValueError(f"call_timeout must not be negative (None or 0: no limit), got {timeout}")
    return float(timeout) if timeout and timeout <= LONGEST_S else None
