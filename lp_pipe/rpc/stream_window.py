"""Back-pressure of a stream: how far the producer may be ahead of its consumer."""

from collections import deque

MAX_ITEMS = 16
MAX_BYTES = 16 << 20  # fewer items fit if they are large; one is always allowed


class StreamWindow:
    """The items that were sent and not yet taken."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()
        self._bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether one more item may be sent."""
        return not self._sizes or (len(self._sizes) < MAX_ITEMS and self._bytes < MAX_BYTES)

    def sent(self, size_bytes: int) -> None:
        self._sizes.append(size_bytes)
        self._bytes += size_bytes

    def taken(self, items: int) -> None:
        for _ in range(min(items, len(self._sizes))):
            self._bytes -= self._sizes.popleft()
