"""Who tells of stragglers: in the log and the metrics once, and to those who ask."""

import logging
from collections.abc import Sequence

from lp_pipe.context import log_metrics
from lp_pipe.pipeline.conductor.pace import Pace
from lp_pipe.pipeline.conductor.workers import Workers
from lp_pipe.pipeline.config import PipelineConfig
from lp_pipe.pipeline.results import Straggler
from lp_pipe.pipeline.worker.execution import Report
from lp_pipe.pipeline.worker.whereabouts import Whereabouts

_log = logging.getLogger(__name__)


class Stragglers:
    """Of a pipeline, for its conductor. now: those that there are."""

    def __init__(self, config: PipelineConfig, workers: Workers) -> None:
        self._places = config.ranks.places
        self._pace = Pace(config.ranks, dict(enumerate(config.predicted_seconds)))
        self._workers = workers
        self._by_rank: dict[int, Straggler] = {}

    @property
    def now(self) -> list[Straggler]:
        """Asked in any thread, while the conductor's takes note of steps."""
        found = dict(self._by_rank)
        return [found[rank] for rank in sorted(found)]

    def begin_again(self) -> None:
        """A worker was restarted, perhaps on another host: who is slow then is told of anew, with where it is."""
        self._pace.begin_again()
        self._by_rank = {}

    def note(self, step: int, reports: Sequence[Report], microbatches: int) -> None:
        """A step has ended."""
        news, well = self._pace.note([report.busy_s for report in reports], microbatches)
        for rank in well:
            found = self._by_rank.pop(rank, None)
            if found is None:
                continue  # a worker died while the others were asked where they run: nobody was told
            _log.warning("%s on %s is no straggler any more, after step %d", found.node, found.host, step)
            log_metrics({f"straggler/{found.node}": 1.0}, step)
        if not news:
            return
        places: list[Whereabouts] = self._workers.all("whereabouts")
        for slow in news:
            node, host, stages = places[slow.rank]
            worker, replica = self._places[slow.rank]
            seconds = slow.measured_seconds, slow.expected_seconds
            found = Straggler(node, host, worker, replica, stages, step, *seconds, slow.by)
            self._by_rank[slow.rank] = found
            _log.warning("straggler: %s, after step %d", found, step)
            log_metrics({f"straggler/{node}": slow.ratio}, step)
