"""Processes that compute while layers are measured, as the other stages of a pipeline do on cores of the same host."""

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lp_pipe.context import context, stop_event
from lp_pipe.errors import NodeError, PipelineError, Unavailable
from lp_pipe.launch import launch
from lp_pipe.measuring.layer_rounds import Work
from lp_pipe.nodes import CourierNode
from lp_pipe.program import Program
from lp_pipe.training.device import computing_with

_LIMIT_S = 600.0  # after which they end, even if the process that waits for them does not
_PATIENCE_S = 10.0  # until the launcher knows why a process does not answer any more


@contextmanager
def others_busy(work: Work, count: int, limit_s: float = _LIMIT_S) -> Iterator[None]:
    """Let `count` other processes do the same work, each for itself, while the body runs.

    They are warm when the body begins, and nothing is left of them when the block ends, however it ends. At
    its end it is known whether they have kept busy.

    Raises:
        PipelineError: count is below 0; or they have failed, or worked for longer than limit_s.
        SerializationError: the work does not pickle.
    """
    if count < 0:
        raise PipelineError(f"busy={count + 1}: must be at least 1: this process is the first")
    if count == 0:
        yield
        return
    program = Program("profile_busy")
    with program.group("busy"):
        handles = [program.add_node(CourierNode(Busy, work, limit_s)) for _ in range(count)]
    with (
        tempfile.TemporaryDirectory(prefix="lp-profile-") as run_dir,
        _explained(limit_s),
        launch(program, "process", run_dir=run_dir, hang_after=None) as run,
    ):
        others = [run.client(handle) for handle in handles]
        try:
            for other in others:
                other.wait_until_warm()
            yield
            for other in others:
                other.rounds_done()
        except Unavailable:
            with suppress(TimeoutError):
                run.wait(_PATIENCE_S)  # raises the first failure, as soon as the launcher knows it
            raise


class Busy:
    """A node that trains copies of the layers until its program stops."""

    def __init__(self, work: Work, limit_s: float) -> None:
        self._work = work
        self._limit_s = limit_s
        self._is_warm = threading.Event()
        self._rounds_done = 0

    def run(self) -> None:
        """Train for limit_s at most."""
        ends = time.monotonic() + self._limit_s
        is_stopping = stop_event()
        with computing_with(context().resources.threads):
            rounds = self._work.rounds()
            rounds.warm_up()
            self._is_warm.set()
            while not is_stopping.is_set() and time.monotonic() < ends:
                rounds.run()
                self._rounds_done += 1

    def wait_until_warm(self) -> None:
        """Wait until the rounds have begun."""
        self._is_warm.wait()

    def rounds_done(self) -> int:
        """Return how many rounds are done so far."""
        return self._rounds_done


@contextmanager
def _explained(limit_s: float) -> Iterator[None]:
    try:
        yield
    except NodeError as error:
        raise PipelineError(f"the processes that compute beside the profile (busy=) have failed: {error}") from error
    except Unavailable as error:
        raise PipelineError(
            f"the processes that compute beside the profile (busy=) have ended before it did, perhaps after their "
            f"limit of {limit_s:g} s: profile a smaller micro-batch"
        ) from error
