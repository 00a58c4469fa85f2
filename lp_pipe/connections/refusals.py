"""Counts and logs the connections that a listener refuses."""

import logging
import threading

from lp_pipe.connections.resource_limits import describe_error

_log = logging.getLogger(__name__)
_MOST_REASONS = 100


class Refusals:
    """The refused connections of one listener, whose name is `label`.

    The log has the 1st, 2nd, 4th, 8th, … for each reason: refused peers must not fill the disk, and port scans must not
    hide a peer that knows more.
    """

    def __init__(self, label: str) -> None:
        self.count = 0
        self._label = label
        self._by_reason: dict[str, int] = {}
        self._lock = threading.Lock()
        self._is_waiting = False

    def note(self, stranger: str, why: str) -> None:
        """Count a refused peer, and perhaps log it; any thread."""
        with self._lock:
            self.count += 1
            total = self.count
            key = why if why in self._by_reason or len(self._by_reason) < _MOST_REASONS else ""
            count = self._by_reason[key] = self._by_reason.get(key, 0) + 1
        if count & (count - 1) == 0:
            so_far = f"{count} times so far, of {total} in all"
            _log.warning("%s has refused %s: %s (%s)", self._label, stranger, why, so_far)

    def keep_waiting(self, error: OSError) -> None:
        """Log that no connection can be accepted at the moment; once, until `go_on`."""
        if not self._is_waiting:
            _log.warning("%s keeps all callers waiting: %s", self._label, describe_error(error))
        self._is_waiting = True

    def go_on(self) -> None:
        """Note that a connection was accepted."""
        self._is_waiting = False
