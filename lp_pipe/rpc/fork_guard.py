"""What belongs to one process: a forked child must leave it to its parent."""

import os
from concurrent.futures import Future

from lp_pipe.errors import Unavailable


class ForkGuard:
    """The process that makes it."""

    _forks = 0  # between this process and its first

    def __init__(self) -> None:
        self._made_at = ForkGuard._forks

    @property
    def is_here(self) -> bool:
        """Whether this is the process."""
        return self._made_at == ForkGuard._forks

    def check(self, what: str, advice: str = "call again here") -> None:
        """
        Raises:
            Unavailable: this is a forked child of it.
        """
        if not self.is_here:
            raise Unavailable(f"{what} belongs to the process that this one ({os.getpid()}) was forked from: {advice}")

    @classmethod
    def _forked(cls) -> None:
        cls._forks += 1


def no_endpoint() -> "Future[str]":
    """What a forked child gets for where a server listens; it looks again in a moment whether somebody does."""
    answer: Future[str] = Future()
    answer.set_result("")
    return answer


os.register_at_fork(after_in_child=ForkGuard._forked)
