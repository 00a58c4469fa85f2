"""One thread per process that acts when deadlines pass."""

import heapq
import itertools
import threading
import time
from collections.abc import Callable


class Deadlines:
    """Calls `action()` at its time, in one daemon thread that starts with the first deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._changed = threading.Condition()
        self._order = itertools.count()
        self._thread: threading.Thread | None = None

    def add(self, when: float, action: Callable[[], object]) -> None:
        """Call `action` once time.monotonic() reaches `when`. It must be quick, and harmless if no longer needed."""
        with self._changed:
            heapq.heappush(self._heap, (when, next(self._order), action))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="deadlines", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._heap or self._heap[0][0] > time.monotonic():
                    self._changed.wait(self._heap[0][0] - time.monotonic() if self._heap else None)
                _, _, action = heapq.heappop(self._heap)
            action()


shared = Deadlines()
