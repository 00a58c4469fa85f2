"""Steps that a worker is asked for before the one before has ended, and does one after the other."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lp_pipe.errors import ChannelClosed


class StepOrder:
    """Called by the threads of several steps, each of which has a tag, and by whoever aborts them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ended = self._failed = 0  # the last step's tag
        self._aborted: tuple[int, str] = (0, "")

    @contextmanager
    def step(self, tag: int, after: int) -> Iterator[None]:
        """Step `tag` is the body, once step `after` has ended (0: there is none).

        Raises:
            ChannelClosed: that one has failed, or this one was aborted.
        """
        has_ended = False
        try:
            self._wait_for(after, tag)
            yield
            has_ended = True
        finally:
            with self._changed:
                self._ended = tag
                self._failed = self._failed if has_ended else tag
                self._changed.notify_all()

    def abort(self, tag: int, reason: str) -> None:
        """Let steps up to `tag` that still wait fail."""
        with self._changed:
            self._aborted = (tag, reason)
            self._changed.notify_all()

    def _wait_for(self, after: int, tag: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= after or self._aborted[0] >= tag)
            if self._aborted[0] >= tag:
                raise ChannelClosed(self._aborted[1])
            if after and self._failed == after:
                raise ChannelClosed("the step before has failed")
