"""Counts and logs the connections that a listener refuses."""

import logging
import threading
import time
from collections import Counter

from lp_pipe.connections.resource_limits import describe_error

_log = logging.getLogger(__name__)
_MOST_LINES = 100
_SUMMARY_EVERY_S = 60.0
_SHOWN_IN_SUMMARY = 5


class Refusals:
    """The refused connections of the listener named `label`.

    The log has the first of each address and reason, for the first 100 pairs, and then at most one line of counts a
    minute. So refused peers cannot fill the disk, and port scans do not hide a peer that knows more.
    """

    def __init__(self, label: str) -> None:
        self.count = 0
        self._label = label
        self._seen: set[tuple[str, str]] = set()
        self._not_logged: Counter[tuple[str, str]] = Counter()
        self._summary_at = 0.0  # when the next line of counts may be logged
        self._lock = threading.Lock()
        self._is_waiting = False

    def note(self, stranger: str, why: str) -> None:
        """Count a refused peer ("ADDRESS:PORT"), and perhaps log it. Any thread may call this."""
        key = stranger.rpartition(":")[0] or stranger, why
        with self._lock:
            self.count += 1
            is_first = key not in self._seen and len(self._seen) < _MOST_LINES
            if is_first:
                self._seen.add(key)
            else:
                self._summary_at = self._summary_at or time.monotonic() + _SUMMARY_EVERY_S
                self._not_logged[key if key in self._seen else ("other peers", "other reasons")] += 1
            is_due = not is_first and time.monotonic() >= self._summary_at
        if is_first:
            _log.warning("%s has refused %s: %s", self._label, stranger, why)
        if is_due:
            self.summarize()

    def summarize(self) -> None:
        """Log the counts of refused peers since the last summary, if any. Called when the listener closes."""
        with self._lock:
            counts, self._not_logged = self._not_logged, Counter()
            self._summary_at = 0.0
            total = self.count
        if counts:
            parts = [f"{count} x {address}: {why}" for (address, why), count in counts.most_common(_SHOWN_IN_SUMMARY)]
            parts += [f"{len(counts) - len(parts)} more reasons"] if len(counts) > len(parts) else []
            text = "; ".join(parts)
            _log.warning("%s has refused %d more (%d in all): %s", self._label, counts.total(), total, text)

    def keep_waiting(self, error: OSError) -> None:
        """Log that no connection can be accepted at the moment; once, until `go_on`."""
        if not self._is_waiting:
            _log.warning("%s keeps all callers waiting: %s", self._label, describe_error(error))
        self._is_waiting = True

    def go_on(self) -> None:
        """Note that a connection was accepted."""
        self._is_waiting = False
