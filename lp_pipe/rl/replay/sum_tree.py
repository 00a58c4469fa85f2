"""A binary tree of sums, to draw indices in proportion to their weights."""

import numpy as np

from lp_pipe.rl.tree import Array


class SumTree:
    """Weights of `capacity` indices. A parent is recomputed from its children, so all sums follow from the weights.

    A restored tree therefore has the same bits, whatever the order of the updates was. Source: Schaul et al.,
    "Prioritized Experience Replay" (2016), appendix B.2.1.
    """

    def __init__(self, capacity: int) -> None:
        self._levels = max(0, (capacity - 1).bit_length())
        self._first_leaf = 1 << self._levels
        self._sums = np.zeros(2 * self._first_leaf)
        self._children = self._sums.reshape(-1, 2)  # row i: the sums of the two children of node i

    @property
    def total(self) -> float:
        return float(self._sums[1])

    def weights(self, indices: Array) -> Array:
        """Return the weights of these indices."""
        found: Array = self._sums[self._first_leaf + indices]
        return found

    def update(self, indices: Array, weights: Array) -> None:
        """Set weights; of an index that occurs twice the last one counts."""
        sums, children = self._sums, self._children
        places = self._first_leaf + indices
        sums[places] = weights
        first = self._first_leaf >> 1  # of the level above
        while first > 4 * len(places):
            places = places >> 1
            pairs = children[places]
            sums[places] = pairs[:, 0] + pairs[:, 1]
            first >>= 1
        while first:  # a whole level is faster than so many of its nodes
            np.add(children[first : 2 * first, 0], children[first : 2 * first, 1], out=sums[first : 2 * first])
            first >>= 1

    def update_run(self, first: int, weights: Array) -> None:
        """Set the weights of consecutive indices: an `update`, only faster."""
        sums, children = self._sums, self._children
        first += self._first_leaf
        end = first + len(weights)
        sums[first:end] = weights
        while end - first > 1:
            first, end = first >> 1, (end + 1) >> 1
            np.add(children[first:end, 0], children[first:end, 1], out=sums[first:end])
        value = float(sums[first])
        while first > 1:
            value += float(sums[first ^ 1])
            first >>= 1
            sums[first] = value

    def find(self, shares: Array) -> Array:
        """Return, for each share (0 to below 1) of the total, the index at that place; its weight is above 0."""
        places = self._descended(shares * self._sums[1])
        if not self._sums[places].all():  # rounding has led past the last weight: rare
            places = self._descended(shares * self._sums[1], may_be_past=True)
        found: Array = places - self._first_leaf
        return found

    def _descended(self, rests: Array, *, may_be_past: bool = False) -> Array:
        places = np.ones(len(rests), dtype=np.int64)
        for _ in range(self._levels):
            places += places
            lefts = self._sums.take(places)
            goes_right = rests >= lefts
            if may_be_past:
                goes_right &= self._sums.take(places + 1) > 0.0
            lefts *= goes_right
            rests -= lefts
            places += goes_right
        return places
