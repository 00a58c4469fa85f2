"""A guard for objects that belong to one process: a forked child must leave them to its parent."""

import os
from concurrent.futures import Future

from lp_pipe.errors import Unavailable


class ForkGuard:
    """A record of the process that made it."""

    _forks = 0  # the number of forks between this process and the first one

    def __init__(self) -> None:
        self._made_at = ForkGuard._forks

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the guard."""
        return self._made_at == ForkGuard._forks

    def check(self, what: str, advice: str = "call again here") -> None:
        """Check that this is the process that made the guard.

        Raises:
            Unavailable: this is a forked child of that process.
        """
        if not self.is_here:
            raise Unavailable(f"{what} belongs to the process that this one ({os.getpid()}) was forked from: {advice}")

    @classmethod
    def _forked(cls) -> None:
        cls._forks += 1


def no_endpoint() -> "Future[str]":
    """Return the future that a forked child gets for a server's endpoint: "", so that it tries again in a moment."""
    answer: Future[str] = Future()
    answer.set_result("")
    return answer


os.register_at_fork(after_in_child=ForkGuard._forked)
