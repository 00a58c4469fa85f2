"""The calls per second of a node's servers."""

import time
from collections import deque
from collections.abc import Callable

_WINDOW_S = 1.0


class CallRate:
    """The mean over the last one to three seconds, computed from totals that are counted now and then.

    ask: returns the total where the servers are in this process, or None if there is no server.
    """

    def __init__(self, ask: Callable[[], int | None] | None = None) -> None:
        self._ask = ask
        self._totals = deque([(time.monotonic(), 0)], maxlen=3)

    def count(self, calls: int) -> None:
        """calls: the total by now."""
        now = time.monotonic()
        if len(self._totals) > 1 and now - self._totals[-2][0] < _WINDOW_S:
            self._totals.pop()
        self._totals.append((now, calls))

    @property
    def per_second(self) -> float | None:
        """The rate; None for a node without servers, and before the first report."""
        if self._ask is not None:
            calls = self._ask()
            if calls is None:
                return None
            self.count(calls)
        (began, first), (ended, last) = self._totals[0], self._totals[-1]
        return round((last - first) / (ended - began), 1) if ended > began else None
