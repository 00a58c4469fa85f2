"""Stragglers: stage workers that take much longer than they should, by the times that every step reports anyway."""

import logging
from collections.abc import Sequence

from lp_pipe.context import log_metrics
from lp_pipe.pipeline.conductor.workers import Workers
from lp_pipe.pipeline.config import PipelineConfig, Ranks
from lp_pipe.pipeline.protocol import GetInfo, Report
from lp_pipe.pipeline.results import Straggler
from lp_pipe.training.stragglers import StragglerDetector

_log = logging.getLogger(__name__)


class Stragglers:
    """The stragglers of a pipeline. Each is reported once, in the log and the metrics."""

    def __init__(self, config: PipelineConfig, workers: Workers) -> None:
        self._ranks = config.ranks
        self._pace = detector_of(config.ranks, config.predicted_seconds)
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
        news, well = self._pace.note(per_microbatch(self._ranks, [report.busy_s for report in reports], microbatches))
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
            worker, replica = self._ranks.places[slow.rank]
            seconds = slow.measured_seconds, slow.expected_seconds
            found = Straggler(node, host, worker, replica, stages, step, *seconds, slow.by)
            self._by_rank[slow.rank] = found
            _log.warning("straggler: %s, after step %d", found, step)
            log_metrics({f"straggler/{node}": slow.ratio}, step)


def detector_of(ranks: Ranks, predicted: Sequence[float]) -> StragglerDetector:
    """Return a detector for stage workers. predicted: a plan's seconds per micro-batch of one replica, by worker."""
    peers = [[other for other in ranks.of(worker) if other != rank] for rank, (worker, _) in enumerate(ranks.places)]
    expected = {rank: predicted[worker] for rank, (worker, _) in enumerate(ranks.places) if worker < len(predicted)}
    return StragglerDetector(peers, expected, "by the other replicas of its stage")


def per_microbatch(ranks: Ranks, busy_s: Sequence[float], microbatches: int) -> list[float | None]:
    """Return the seconds of computation per micro-batch, by rank; None for a replica without one."""
    counts = [len(range(replica, microbatches, ranks.replicas[worker])) for worker, replica in ranks.places]
    return [seconds / count if count else None for seconds, count in zip(busy_s, counts, strict=True)]
