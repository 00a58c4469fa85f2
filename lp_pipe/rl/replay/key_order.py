"""The keys of a table's items in the order of their age, with the slots that hold the items."""

import numpy as np

from lp_pipe.rl.tree import Array

_GONE = -1


class KeyOrder:
    """Keys and slots of at most `capacity` items, the oldest first. Keys are given in rising order.

    Two arrays of twice the capacity: a removed item leaves a gap, and the gaps are closed once an array is full. So
    the memory is the same for ever, and a dict of as many keys takes longer.
    """

    def __init__(self, capacity: int) -> None:
        self._keys = np.zeros(2 * capacity, dtype=np.int64)
        self._slots = np.zeros(2 * capacity, dtype=np.int64)
        self._first = self._end = 0  # neither the first nor the last entry is a gap
        self.size = 0

    def append(self, keys: Array, slots: Array) -> None:
        """Add items that are newer than all others."""
        if self._end + len(keys) > len(self._keys):
            self._close_gaps()
        end = self._end + len(keys)
        self._keys[self._end : end], self._slots[self._end : end] = keys, slots
        self._end = end
        self.size += len(keys)

    def slots(self) -> Array:
        """Return the slots of all items, the oldest first."""
        slots = self._slots[self._first : self._end]
        found: Array = slots[slots != _GONE]
        return found

    def slots_of(self, keys: Array) -> Array:
        """Return the slots of these keys; -1 for a key that is gone, or never was."""
        first, end = self._first, self._end
        if first == end:
            return np.full(len(keys), _GONE)
        oldest = int(self._keys[first])
        if int(self._keys[end - 1]) - oldest == end - 1 - first:  # as long as only the oldest items leave
            places = keys - (oldest - first)
            is_known = (places >= first) & (places < end)
            places = np.where(is_known, places, first)
        else:
            places = np.minimum(np.searchsorted(self._keys[first:end], keys) + first, end - 1)
            is_known = self._keys[places] == keys
        return np.where(is_known, self._slots[places], _GONE)

    def oldest(self) -> int:
        """Return the slot of the oldest item."""
        return int(self._slots[self._first])

    def newest(self) -> int:
        """Return the slot of the newest item."""
        return int(self._slots[self._end - 1])

    def remove_oldest(self, count: int) -> Array:
        """Remove the oldest items, one or more, and return their slots."""
        end = self._first + count
        if self.size == self._end - self._first:
            slots = self._slots[self._first : end].copy()
        else:
            slots = self.slots()[:count]
            end = self._first + int(np.flatnonzero(self._slots[self._first : self._end] != _GONE)[count - 1]) + 1
        self._first = end
        self.size -= count
        self._skip_gaps()
        return slots

    def remove(self, key: int) -> None:
        """Remove an item."""
        self._slots[self._first + int(np.searchsorted(self._keys[self._first : self._end], key))] = _GONE
        self.size -= 1
        self._skip_gaps()

    def _skip_gaps(self) -> None:
        if not self.size:
            self._first = self._end = 0
            return
        while self._slots[self._first] == _GONE:
            self._first += 1
        while self._slots[self._end - 1] == _GONE:
            self._end -= 1

    def _close_gaps(self) -> None:
        kept = self._first + np.flatnonzero(self._slots[self._first : self._end] != _GONE)
        self._keys[: self.size], self._slots[: self.size] = self._keys[kept], self._slots[kept]
        self._first, self._end = 0, self.size
