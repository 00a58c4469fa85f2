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

    @property
    def total(self) -> float:
        return float(self._sums[1])

    def weights(self, indices: Array) -> Array:
        """Return the weights of these indices."""
        found: Array = self._sums[self._first_leaf + indices]
        return found

    def update(self, indices: Array, weights: Array) -> None:
        """Set weights; of an index that occurs twice the last one counts."""
        places = self._first_leaf + indices
        self._sums[places] = weights
        for _ in range(self._levels):
            places = places >> 1
            self._sums[places] = self._sums[2 * places] + self._sums[2 * places + 1]

    def find(self, shares: Array) -> Array:
        """Return, for each share (0 to below 1) of the total, the index at that place; its weight is above 0."""
        rests = shares * self._sums[1]
        places = np.ones(len(rests), dtype=np.int64)
        for _ in range(self._levels):
            places = 2 * places
            lefts = self._sums[places]
            goes_right = (rests >= lefts) & (self._sums[places + 1] > 0.0)  # rounding may lead past the last weight
            rests = np.where(goes_right, rests - lefts, rests)
            places = places + goes_right
        found: Array = places - self._first_leaf
        return found
