"""Forbid launches while a file is imported for the program that it defines."""

from collections.abc import Iterator
from contextlib import contextmanager

from lp_pipe.errors import LaunchError

_why: str | None = None


@contextmanager
def launches_refused(why: str) -> Iterator[None]:
    """Make every launch in the body, in any thread of the process, raise a LaunchError with the text `why`."""
    global _why
    before, _why = _why, why
    try:
        yield
    finally:
        _why = before


def check_not_refused() -> None:
    """Raise LaunchError inside of `launches_refused`."""
    if _why is not None:
        raise LaunchError(_why)
