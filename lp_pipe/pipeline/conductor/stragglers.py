"""Stragglers: stage workers that take much longer than they should, by the times that every step reports anyway."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from lp_pipe.context import log_metrics
from lp_pipe.pipeline.conductor.workers import Workers
from lp_pipe.pipeline.config import PipelineConfig, Ranks
from lp_pipe.pipeline.protocol import GetInfo, Report
from lp_pipe.pipeline.results import Straggler

_WARM_UP = 3  # steps that are always slow: memory is allocated, kernels are chosen
_WINDOW = 15  # steps whose median counts, so that a few slow ones do not
_EVERY = 5  # steps between two looks
_SLOW, _WELL_AGAIN = 2.0, 1.5
_NOISE_S = 1e-3  # per micro-batch: smaller differences from the expected time do not matter


@dataclass(frozen=True)
class SlowWorker:
    """A slow worker's rank, and its seconds per micro-batch. by: where the expected seconds come from."""

    rank: int
    measured_seconds: float
    expected_seconds: float
    by: str

    @property
    def ratio(self) -> float:
        """How many times slower it is."""
        return self.measured_seconds / self.expected_seconds


class StragglerDetector:
    """Finds stragglers. predicted: a plan's seconds per micro-batch of one replica, by worker.

    Without a plan, a worker is compared with the other replicas of its stages, and with its own first steps.
    Larger batches or a busy host, which slow down all workers alike, make no straggler.
    """

    def __init__(self, ranks: Ranks, predicted: Mapping[int, float]) -> None:
        self._ranks = ranks
        self._places = ranks.places
        self._predicted = predicted
        self._recent: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in self._places]
        self._usual: list[float] = []  # the medians of the first window
        self._steps = 0
        self.slow: dict[int, SlowWorker] = {}  # now, by rank

    def note(self, busy_s: Sequence[float], microbatches: int) -> tuple[list[SlowWorker], list[int]]:
        """Take note of a step's seconds of computation, by rank.

        Returns the workers that have become slow, and the ranks of those that are not slow any more.
        """
        self._steps += 1
        if self._steps <= _WARM_UP:
            return [], []
        for recent, (worker, replica), seconds in zip(self._recent, self._places, busy_s, strict=True):
            own = len(range(replica, microbatches, self._ranks.replicas[worker]))
            if own:
                recent.append(seconds / own)
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
        worker, _ = self._places[rank]
        if self._predicted.get(worker):
            return [(self._predicted[worker], "by the plan")]
        others = [medians[other] for other in self._ranks.of(worker) if other != rank]
        found = [(self._usual[rank] * self._others_ratio(rank, medians), "by its first steps")]
        return [*found, (median(others), "by the other replicas of its stage")] if others else found

    def _others_ratio(self, rank: int, medians: Sequence[float]) -> float:
        """Return how many times slower all others have become at least; 0 without others."""
        pairs = enumerate(zip(medians, self._usual, strict=True))
        ratios = [now / usual for other, (now, usual) in pairs if other != rank and usual]
        return max(1.0, min(ratios)) if ratios else 0.0


_log = logging.getLogger(__name__)


class Stragglers:
    """The stragglers of a pipeline. Each is reported once, in the log and the metrics."""

    def __init__(self, config: PipelineConfig, workers: Workers) -> None:
        self._places = config.ranks.places
        self._pace = StragglerDetector(config.ranks, dict(enumerate(config.predicted_seconds)))
        self._workers = workers
        self._by_rank: dict[int, Straggler] = {}

    @property
    def now(self) -> list[Straggler]:
        """Return the current stragglers. Any thread may ask, while the conductor's thread takes note of steps."""
        found = dict(self._by_rank)
        return [found[rank] for rank in sorted(found)]

    def begin_again(self) -> None:
        """Forget the stragglers: a worker was restarted, perhaps on another host. A slow one is then reported again."""
        self._pace.begin_again()
        self._by_rank = {}

    def note(self, step: int, reports: Sequence[Report], microbatches: int) -> None:
        """Take note of a finished step."""
        news, well = self._pace.note([report.busy_s for report in reports], microbatches)
        for rank in well:
            found = self._by_rank.pop(rank, None)
            if found is None:
                continue  # not reported: a worker died while the others were asked where they run
            _log.warning("%s on %s is no straggler any more, after step %d", found.node, found.host, step)
            log_metrics({f"straggler/{found.node}": 1.0}, step)
        if not news:
            return
        places = self._workers.all(GetInfo())
        for slow in news:
            node, host, stages = places[slow.rank]
            worker, replica = self._places[slow.rank]
            seconds = slow.measured_seconds, slow.expected_seconds
            found = Straggler(node, host, worker, replica, stages, step, *seconds, slow.by)
            self._by_rank[slow.rank] = found
            _log.warning("straggler: %s, after step %d", found, step)
            log_metrics({f"straggler/{node}": slow.ratio}, step)
