"""Code that must not launch anything: a file that is being imported for its program."""

from collections.abc import Iterator
from contextlib import contextmanager

from lp_pipe.errors import LaunchError

_why: str | None = None


@contextmanager
def launches_refused(why: str) -> Iterator[None]:
    """In the body, in every thread of the process, a launch is a LaunchError that says why."""
    global _why
    before, _why = _why, why
    try:
        yield
    finally:
        _why = before


def check_not_refused() -> None:
    """
    Raises:
        LaunchError: inside of `launches_refused`.
    """
    if _why is not None:
        raise LaunchError(_why)
