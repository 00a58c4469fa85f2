"""Strangers who came to a listener, counted and logged."""

import logging
import threading

_log = logging.getLogger(__name__)


class Refusals:
    """Of one listener, whose name is `label`.

    The log has the 1st, the 2nd, the 4th, the 8th, … of them: whoever is not let in must not fill the disk either.
    """

    def __init__(self, label: str) -> None:
        self.count = 0
        self._label = label
        self._lock = threading.Lock()

    def note(self, stranger: str, why: str) -> None:
        """Called once for each; any thread."""
        with self._lock:
            self.count += 1
            count = self.count
        if count & (count - 1) == 0:
            _log.warning("%s has refused %s: %s (refused so far: %d)", self._label, stranger, why, count)
