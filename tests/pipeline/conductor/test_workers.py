"""Operations on all workers of a pipeline: when they end, and which failure counts."""

from concurrent.futures import Future

from lp_pipe.pipeline.conductor.workers import Attempt
from lp_pipe.pipeline.worker.execution import Report
from lp_pipe.rpc.pool import DaemonPool


def test_an_attempt_ends_with_its_last_report_however_late_somebody_asks() -> None:
    """Asynchronous steps end while the caller does other things, which counted as part of them."""
    first: Future[Report] = Future()
    last: Future[Report] = Future()
    attempt = Attempt(lambda reason: None, [first, last], DaemonPool(1, "watchers"))
    first.set_result(Report())
    before = attempt.ended()
    last.set_result(Report())
    ended = attempt.ended()
    assert len(attempt.reports()) == 2
    assert attempt.ended() == ended >= before
