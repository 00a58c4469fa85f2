"""Strangers who came to a listener, counted and logged."""

import logging
import threading
from errno import EMFILE

_log = logging.getLogger(__name__)
_MOST_REASONS = 100


class Refusals:
    """Of one listener, whose name is `label`.

    The log has the 1st, the 2nd, the 4th, the 8th, … for each reason: whoever is not let in must not fill the disk, and
    those who only knock must not hide one who knows more.
    """

    def __init__(self, label: str) -> None:
        self.count = 0
        self._label = label
        self._by_reason: dict[str, int] = {}
        self._lock = threading.Lock()
        self._is_waiting = False

    def note(self, stranger: str, why: str) -> None:
        """Called once for each; any thread."""
        with self._lock:
            self.count += 1
            total = self.count
            key = why if why in self._by_reason or len(self._by_reason) < _MOST_REASONS else ""
            count = self._by_reason[key] = self._by_reason.get(key, 0) + 1
        if count & (count - 1) == 0:
            so_far = f"{count} times so far, of {total} in all"
            _log.warning("%s has refused %s: %s (%s)", self._label, stranger, why, so_far)

    def keep_waiting(self, error: OSError) -> None:
        """Nobody can be let in just now, friends neither; said once until `go_on`."""
        if not self._is_waiting:
            advice = "; raise its limit (ulimit -n)" if error.errno == EMFILE else ""
            _log.warning("%s keeps all callers waiting: this process: %s%s", self._label, error, advice)
        self._is_waiting = True

    def go_on(self) -> None:
        """Somebody came in."""
        self._is_waiting = False
