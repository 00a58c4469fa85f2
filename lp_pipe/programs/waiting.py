"""End without a failure when a peer is unavailable because the program stops."""

import contextlib
from collections.abc import Iterator

import lp_pipe as lp

_NEWS_OF_A_STOP_S = 1.0  # how much later than another node this one may learn of a stop


@contextlib.contextmanager
def until_the_stop() -> Iterator[None]:
    """End the body without a failure when a peer is unavailable because the program stops."""
    try:
        yield
    except lp.Unavailable:
        if not lp.wait_for_stop(_NEWS_OF_A_STOP_S):
            raise
