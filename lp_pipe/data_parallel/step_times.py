"""The times of a worker's steps: its progress and waits as metrics, and which workers are stragglers."""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lp_pipe.context import log_metrics
from lp_pipe.data_parallel.gradient_sums import BucketSum
from lp_pipe.data_parallel.workers import ReplicaWorkers
from lp_pipe.training.stragglers import StragglerDetector

_log = logging.getLogger(__name__)
_EVERY_S = 1.0  # between two records of metrics
_MOST_MS = 6e4  # half-precision buckets have no larger numbers


@dataclass(frozen=True)
class SlowReplica:
    """A worker that takes much longer than expected, in seconds of computation per micro-batch.

    since: the step after which it was found. expected_by: "by its first steps" or "by the other workers".
    """

    node: str
    since: int
    measured_seconds: float
    expected_seconds: float
    expected_by: str

    def __str__(self) -> str:
        ratio = self.measured_seconds / self.expected_seconds
        return (
            f"{self.node} is {ratio:.1f} times slower than expected: {1e3 * self.measured_seconds:.3g} ms per "
            f"micro-batch instead of {1e3 * self.expected_seconds:.3g} ms ({self.expected_by})"
        )


class StepTimes:
    """The times of one worker's steps, and those that the other workers tell. Used by the thread that runs `train`."""

    def __init__(self, workers: ReplicaWorkers) -> None:
        self._workers = workers
        self._generation = -1
        self._detector = StragglerDetector([], {}, "")
        self._slow: dict[int, SlowReplica] = {}  # by rank
        self._since_log = time.monotonic()
        self._steps_since_log = 0
        self._waited_since_log = 0.0
        self._bytes_since_log = 0
        self.begin()

    @property
    def stragglers(self) -> list[SlowReplica]:
        """The stragglers now, as rank 0 knows them."""
        return [slow for _, slow in sorted(self._slow.items())]

    def begin(self) -> None:
        """Begin to measure anew: all workers have just finished something together."""
        self._began = self._told_at = self._computed_at = time.monotonic()
        self._waited = 0.0
        self._wait_began: float | None = None

    def begin_next_step(self) -> None:
        """Begin to measure the next step; what was computed since `by_rank` told the time of this one counts there."""
        untold_s = max(0.0, self._computed_at - self._told_at)
        self.begin()
        self._began -= untold_s

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure a wait for other workers, which is no computation."""
        began = self._wait_began = time.monotonic()
        try:
            yield
        finally:
            self._wait_began = None
            seconds = time.monotonic() - began
            self._waited += seconds
            self._waited_since_log += seconds

    @contextlib.contextmanager
    def summing(self) -> Iterator[None]:
        """Measure the wait for the sums of a step's gradients."""
        with self.waiting():
            self._computed_at = time.monotonic()
            yield

    @contextlib.contextmanager
    def entering(self, context: contextlib.AbstractContextManager[object]) -> Iterator[None]:
        """Enter a context for the body; entering it may wait for other workers."""
        with contextlib.ExitStack() as stack:
            with self.waiting():
                stack.enter_context(context)
            yield

    def by_rank(self, microbatches: int) -> list[float]:
        """Return this worker's milliseconds of computation per micro-batch since `begin`, and zeros for the others.

        Any thread may ask.
        """
        self._told_at = self._wait_began or time.monotonic()
        busy_s = self._told_at - self._began - self._waited
        membership = self._workers.membership
        own = min(_MOST_MS, 1e3 * busy_s / max(1, microbatches))
        return [own if rank == membership.rank else 0.0 for rank in range(membership.world_size)]

    def note(self, step: int, ms_by_rank: Sequence[float], sums: Sequence[BucketSum]) -> None:
        """Take note of a committed step: the milliseconds that all workers told, and the sums of this one's buckets."""
        self._steps_since_log += 1
        self._bytes_since_log += sum(one.num_bytes for one in sums)
        membership = self._workers.membership
        if membership.rank or membership.world_size == 1:
            return
        if self._generation != membership.generation:
            ranks = range(membership.world_size)
            peers = [[other for other in ranks if other != rank] for rank in ranks]
            self._detector = StragglerDetector(peers, {}, "by the other workers")
            self._generation, self._slow = membership.generation, {}
        news, well = self._detector.note([ms / 1e3 for ms in ms_by_rank])
        for rank in well:
            found = self._slow.pop(rank)
            _log.warning("%s is no straggler any more, after step %d", found.node, step)
            log_metrics({f"straggler/{found.node}": 1.0}, step)
        for slow in news:
            seconds = slow.measured_seconds, slow.expected_seconds
            found = self._slow[slow.rank] = SlowReplica(membership.members[slow.rank], step, *seconds, slow.by)
            _log.warning("straggler: %s, after step %d", found, step)
            log_metrics({f"straggler/{found.node}": slow.ratio}, step)

    def log(self, finished: int, total: int) -> None:
        """Log this worker's progress, if the last time is a while ago or this is the end of the loop.

        finished, total: numbers of steps.
        """
        now, steps = time.monotonic(), self._steps_since_log
        if not steps or (now - self._since_log < _EVERY_S and finished < total):
            return
        values = {
            "total_steps": total,
            "step_seconds": (now - self._since_log) / steps,
            "wait_seconds": self._waited_since_log / steps,
            "reduced_bytes": self._bytes_since_log / steps,
        }
        log_metrics(values, finished)
        self._since_log, self._steps_since_log = now, 0
        self._waited_since_log, self._bytes_since_log = 0.0, 0
