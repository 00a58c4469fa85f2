"""Stragglers: stage workers that take much longer than they should, by the times that every step reports anyway."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from lp_pipe.pipeline.ranks import Ranks

_WARM_UP = 3  # steps that are always slow: memory is allocated, kernels are chosen
_WINDOW = 15  # steps whose median counts, so that a few slow ones do not
_EVERY = 5  # steps between two looks
_SLOW, _WELL_AGAIN = 2.0, 1.5
_NOISE_S = 1e-3  # per micro-batch; what is closer to its expected time than that is nobody's trouble


@dataclass(frozen=True)
class Slow:
    """A worker's place, and its seconds per micro-batch: what they are, what they should be, and says who."""

    rank: int
    measured_seconds: float
    expected_seconds: float
    by: str

    @property
    def ratio(self) -> float:
        """How many times slower it is."""
        return self.measured_seconds / self.expected_seconds


@dataclass
class _Times:
    """Of one worker. usual: the median of its first window, in steps of `usual_sizes`."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    usual: float = 0.0


class Pace:
    """predicted: a plan's seconds per micro-batch of one replica, by worker.

    Where there is no plan, a worker is compared with the other replicas of its stages, and with its own first steps.
    """

    def __init__(self, ranks: Ranks, predicted: Mapping[int, float]) -> None:
        self._ranks = ranks
        self._places = ranks.places
        self._predicted = predicted
        self._times = [_Times() for _ in self._places]
        self._sizes: deque[int] = deque(maxlen=_WINDOW)
        self._usual_sizes: set[int] = set()
        self._steps = 0
        self.slow: dict[int, Slow] = {}  # now, by rank

    def note(self, busy_s: Sequence[float], microbatches: int, size: int) -> tuple[list[Slow], list[int]]:
        """A step's seconds of computation, by rank. size: of its batch, in numbers.

        Returns who has become slow by it, and the ranks that were and are not any more.
        """
        self._steps += 1
        if self._steps <= _WARM_UP:
            return [], []
        for times, (worker, replica), seconds in zip(self._times, self._places, busy_s, strict=True):
            own = len(range(replica, microbatches, self._ranks.replicas[worker]))
            if own:
                times.recent.append(seconds / own)
        self._sizes.append(size)
        return self._look() if self._steps % _EVERY == 0 and len(self._sizes) == _WINDOW else ([], [])

    def _look(self) -> tuple[list[Slow], list[int]]:
        medians = [median(times.recent) if times.recent else 0.0 for times in self._times]
        if not self._usual_sizes:
            self._usual_sizes = {*self._sizes}
            for times, found in zip(self._times, medians, strict=True):
                times.usual = found
        now = {rank: slow for rank in range(len(medians)) if (slow := self._slow(rank, medians)) is not None}
        news = [slow for rank, slow in now.items() if slow.ratio >= _SLOW and rank not in self.slow]
        well = [rank for rank in self.slow if rank not in now]
        self.slow = {rank: slow for rank, slow in now.items() if slow.ratio >= _SLOW or rank in self.slow}
        return news, well

    def _slow(self, rank: int, medians: Sequence[float]) -> Slow | None:
        """By the comparison that is the worst for it; None where it is well."""
        measured = medians[rank]
        found = [
            Slow(rank, measured, expected, by)
            for expected, by in self._expectations(rank, medians)
            if expected > 0 and measured >= _WELL_AGAIN * expected and measured - expected >= _NOISE_S
        ]
        return max(found, key=lambda slow: slow.ratio, default=None)

    def _expectations(self, rank: int, medians: Sequence[float]) -> list[tuple[float, str]]:
        worker, _ = self._places[rank]
        if self._predicted.get(worker):
            return [(self._predicted[worker], "the plan predicts")]
        others = [medians[other] for other in self._ranks.of(worker) if other != rank]
        found = [(self._usual(rank, medians), "its first steps took")]
        return [*found, (median(others), "the other replicas of its stage take")] if others else found

    def _usual(self, rank: int, medians: Sequence[float]) -> float:
        """What it took at first; where batches have other sizes now, as much more of it as the others need at least."""
        usual = self._times[rank].usual
        if {*self._sizes} == self._usual_sizes:
            return usual
        ratios = [found / times.usual for found, times in zip(medians, self._times, strict=True) if times.usual]
        return usual * max(1.0, min(ratios, default=1.0))
