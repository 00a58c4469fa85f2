"""All workers of a pipeline, as the one that conducts it calls them."""

import contextlib
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from lp_pipe.errors import Unavailable
from lp_pipe.pipeline.execution import Report
from lp_pipe.pipeline.worker import StageWorker


class Workers:
    """By rank: `own`, which is this process's, then clients of the others."""

    def __init__(self, own: StageWorker, peers: Sequence[Any]) -> None:
        self.own = own
        self._peers = list(peers)
        self._tag = 0

    def some(self, ranks: Sequence[int], method: str, *args: Any) -> list[Any]:
        """What a method of these workers returns; rank 0 is among them, and all work at the same time."""
        futures = [getattr(self._peers[rank - 1].futures, method)(*args) for rank in ranks if rank]
        try:
            results = [getattr(self.own, method)(*args)]
        finally:
            wait(futures)
        return results + [future.result() for future in futures]

    def all(self, method: str, *args: Any) -> list[Any]:
        """What a method of every worker returns, when all of them have ended it."""
        return self.some(range(len(self._peers) + 1), method, *args)

    def run(self, run: Callable[[Any, int, int], Any]) -> list[Report]:
        """Run one operation on every rank; when one fails, free the others from waiting for it.

        Raises:
            Exception: the failure that came first; a worker that only lost its neighbour does not count as first.
        """
        self._tag += 1
        attempt = _Attempt(self._tag, [self.own, *self._peers])
        futures: list[Future[Report]] = []
        for rank, peer in enumerate(self._peers, start=1):
            future: Future[Report] = run(peer.futures, self._tag, rank)
            future.add_done_callback(attempt.watch)
            futures.append(future)
        reports: list[Report] = []
        try:
            reports.append(run(self.own, self._tag, 0))
        except BaseException as error:  # kept as the reason of the whole operation, raised below
            attempt.fail(error)
        for future in futures:
            error_there = future.exception()
            if error_there is None:
                reports.append(future.result())
            else:  # the future wakes this thread before it calls `watch`
                attempt.fail(error_there)
        if attempt.errors:
            with contextlib.suppress(Unavailable):  # a worker that has died is the cause, or comes after it
                self.all("discard")
            raise attempt.cause()
        return reports


class _Attempt:
    """The failures of one operation; the first one frees all workers."""

    def __init__(self, tag: int, workers: list[Any]) -> None:
        self._tag = tag
        self._workers = workers
        self._lock = threading.Lock()
        self.errors: list[BaseException] = []

    def watch(self, future: "Future[Report]") -> None:
        error = future.exception()
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if any(error is known for known in self.errors):
                return
            self.errors.append(error)
            is_first = len(self.errors) == 1
        if is_first:
            # Not str(error): it may be empty, or the user's own and raise.
            first_line = traceback.format_exception_only(error)[0].splitlines()[0]
            reason = f"the operation failed on another stage: {first_line}"
            own, *peers = self._workers
            own.abort(self._tag, reason)
            for peer in peers:
                peer.futures.abort(self._tag, reason)

    def cause(self) -> BaseException:
        return next((error for error in self.errors if not isinstance(error, Unavailable)), self.errors[0])
