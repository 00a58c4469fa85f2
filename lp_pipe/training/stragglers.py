"""Find stragglers: workers that take much longer than they should, by their seconds of computation in each step."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

_WARM_UP = 3  # steps that are always slow: memory is allocated, kernels are chosen
_WINDOW = 15  # steps; their median counts, so that a few slow ones do not
_EVERY = 5  # steps between two looks
_SLOW, _WELL_AGAIN = 2.0, 1.5
_NOISE_S = 1e-3  # smaller differences from the expected time do not matter


@dataclass(frozen=True)
class SlowWorker:
    """The rank of a slow worker, and its seconds per micro-batch. by: where the expected seconds come from."""

    rank: int
    measured_seconds: float
    expected_seconds: float
    by: str

    @property
    def ratio(self) -> float:
        """How many times slower it is."""
        return self.measured_seconds / self.expected_seconds


class StragglerDetector:
    """Finds workers that compute much slower than they should.

    peers: by rank, the other ranks that do the same work; by_peers: how a comparison with them is called. predicted: a
    plan's seconds per micro-batch, by rank.
    Without a plan, a worker is compared with its peers, and with its own first steps. Larger batches or a busy host,
    which slow down all workers alike, make no straggler.
    """

    def __init__(self, peers: Sequence[Sequence[int]], predicted: Mapping[int, float], by_peers: str) -> None:
        self._peers = peers
        self._predicted = predicted
        self._by_peers = by_peers
        self._recent: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in peers]
        self._usual: list[float] = []  # the medians of the first window
        self._steps = 0
        self.slow: dict[int, SlowWorker] = {}  # now, by rank

    def note(self, seconds: Sequence[float | None]) -> tuple[list[SlowWorker], list[int]]:
        """Take note of a step's seconds of computation per micro-batch, by rank; None: the rank had no micro-batch.

        Returns the workers that have become slow, and the ranks of those that are not slow any more.
        """
        self._steps += 1
        if self._steps <= _WARM_UP:
            return [], []
        for recent, measured in zip(self._recent, seconds, strict=True):
            if measured is not None:
                recent.append(measured)
        is_time = self._steps % _EVERY == 0 and self._steps >= _WARM_UP + _WINDOW
        return self._look() if is_time else ([], [])

    def begin_again(self) -> None:
        """Forget recent steps, but not the first ones: a worker was restarted, perhaps on another host."""
        for recent in self._recent:
            recent.clear()
        self._steps, self.slow = 0, {}

    def _look(self) -> tuple[list[SlowWorker], list[int]]:
        medians = [median(recent) if recent else 0.0 for recent in self._recent]
        self._usual = self._usual or medians
        now = {rank: slow for rank in range(len(medians)) if (slow := self._slow(rank, medians)) is not None}
        news = [slow for rank, slow in now.items() if slow.ratio >= _SLOW and rank not in self.slow]
        well = [rank for rank in self.slow if rank not in now]
        self.slow = {rank: slow for rank, slow in now.items() if slow.ratio >= _SLOW or rank in self.slow}
        return news, well

    def _slow(self, rank: int, medians: Sequence[float]) -> SlowWorker | None:
        """Return the comparison in which the worker is slowest; None if it is not slow."""
        measured = medians[rank]
        found = [
            SlowWorker(rank, measured, expected, by)
            for expected, by in self._expectations(rank, medians)
            if expected > 0 and measured >= _WELL_AGAIN * expected and measured - expected >= _NOISE_S
        ]
        return max(found, key=lambda slow: slow.ratio, default=None)

    def _expectations(self, rank: int, medians: Sequence[float]) -> list[tuple[float, str]]:
        if self._predicted.get(rank):
            return [(self._predicted[rank], "by the plan")]
        others = [medians[other] for other in self._peers[rank]]
        found = [(self._usual[rank] * self._others_ratio(rank, medians), "by its first steps")]
        return [*found, (median(others), self._by_peers)] if others else found

    def _others_ratio(self, rank: int, medians: Sequence[float]) -> float:
        """Return how many times slower all others have become at least; 0 without others."""
        pairs = enumerate(zip(medians, self._usual, strict=True))
        ratios = [now / usual for other, (now, usual) in pairs if other != rank and usual]
        return max(1.0, min(ratios)) if ratios else 0.0
