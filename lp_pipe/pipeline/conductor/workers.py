"""All workers of a pipeline, as the one that conducts it calls them."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from lp_pipe.context import context
from lp_pipe.errors import NonFiniteError, Unavailable
from lp_pipe.pipeline.worker.execution import Report
from lp_pipe.pipeline.worker.worker import StageWorker
from lp_pipe.rpc.calls import add_quick_callback
from lp_pipe.rpc.daemon_pool import DaemonPool
from lp_pipe.rpc.futures import read_by
from lp_pipe.rpc.remote_error import headline

_MOST_SAID = 1000  # characters of a failure, to workers that only end because of it

_log = logging.getLogger(__name__)


class Workers:
    """By rank: `own`, which is this process's, then clients of the others."""

    def __init__(self, own: StageWorker, peers: Sequence[Any]) -> None:
        self.own = own
        self._peers = list(peers)
        self._tag = 0
        self._pool = DaemonPool(1, "steps ahead")
        self._watchers = DaemonPool(1, "failed operations")
        for pool in (self._pool, self._watchers):
            context().exit_stack.callback(pool.close)

    def clients(self, own: Any) -> list[Any]:
        """Of all workers, by rank. own: one of this process's worker."""
        return [own, *self._peers]

    def new_tag(self) -> int:
        """The number of a new operation, higher than all before."""
        self._tag += 1
        return self._tag

    def some(self, ranks: Sequence[int], method: str, *args: Any) -> list[Any]:
        """What a method of these workers returns; rank 0 is the first of them, and all work at the same time."""
        return self.each(ranks, method, [args] * len(ranks))

    def each(self, ranks: Sequence[int], method: str, args: Sequence[Sequence[Any]]) -> list[Any]:
        """As `some`, with arguments for each."""
        assert ranks[0] == 0, f"rank 0 is not the first of {ranks}"
        pairs = zip(ranks[1:], args[1:], strict=True)
        futures = [getattr(read_by("caller", self._peers[rank - 1]), method)(*own) for rank, own in pairs]
        try:
            results = [getattr(self.own, method)(*args[0])]
        finally:
            for future in futures:
                future.exception()  # unlike concurrent.futures.wait this reads the reply, and at once
        return results + [future.result() for future in futures]

    def all(self, method: str, *args: Any) -> list[Any]:
        """What a method of every worker returns, when all of them have ended it."""
        return self.some(range(len(self._peers) + 1), method, *args)

    def run(self, run: Callable[[Any, int, int], Any]) -> list[Report]:
        """Run one operation on every rank; when one fails, free the others from waiting for it.

        Raises:
            Exception: the failure that came first; a worker that only lost its neighbour does not count as first.
        """
        tag = self.new_tag()
        attempt = self._attempt(tag, self._start(lambda peer, rank: run(peer, tag, rank)))
        try:
            own = run(self.own, tag, 0)
        except BaseException as error:  # kept as the reason of the whole operation, raised below
            attempt.fail(error)
        try:
            others = attempt.reports()
        except BaseException:
            self.discard()
            raise
        return [own, *others]

    def begin(self, tag: int, run: Callable[[Any, int], Any]) -> "Attempt":
        """Begin an operation on every rank, perhaps before another has ended; after a failure call `discard`.

        tag: the highest of what it waits for.
        """
        peers = self._start(run)
        own: Future[Report] = self._pool.start(lambda: run(self.own, 0))
        return self._attempt(tag, [own, *peers])

    def discard(self) -> None:
        """Let all workers forget what the last operation, a failed one, has left, once none works on it any more."""
        with contextlib.suppress(Unavailable):  # a worker that has died is the cause, or comes after it
            self.all("discard", self._tag)

    def _start(self, run: Callable[[Any, int], Any]) -> "list[Future[Report]]":
        """On the other ranks."""
        return [_called(run, read_by("thread", peer), rank) for rank, peer in enumerate(self._peers, start=1)]

    def _attempt(self, tag: int, futures: "Sequence[Future[Report]]") -> "Attempt":
        def abort(reason: str) -> None:
            self.own.abort(tag, reason)
            for peer in self._peers:
                read_by("thread", peer).abort(tag, reason)

        return Attempt(abort, futures, self._watchers)


def _called(run: Callable[[Any, int], Any], peer: Any, rank: int) -> "Future[Report]":
    """A call that cannot be made (its arguments do not pickle) has failed: those made before it must be freed."""
    try:
        future: Future[Report] = run(peer, rank)
    except BaseException as error:
        future = Future()
        future.set_exception(error)
    return future


class Attempt:
    """An operation's reports, or its failures; the first one frees all workers.

    watchers: where failures are handled of which nobody has asked yet.
    """

    def __init__(self, abort: Callable[[str], None], futures: "Sequence[Future[Report]]", watchers: DaemonPool) -> None:
        self._abort = abort
        self._futures = futures
        self._watchers = watchers
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._ends: list[float] = []  # of each future
        for future in futures:
            add_quick_callback(future, self._notice)

    def ended(self) -> float:
        """When the last report came, after `reports`, in time.monotonic() seconds: perhaps long before that."""
        now = time.monotonic()  # first, so that it is never after the end of the operation behind this one
        # A future wakes who waits for it before it calls `_notice`: then it is now.
        return max(self._ends) if len(self._ends) == len(self._futures) else now

    def failure(self) -> BaseException | None:
        """What `reports` raises, if it does."""
        try:
            self.reports()
        except BaseException as error:
            return error
        return None

    def reports(self) -> list[Report]:
        """Wait for all of them.

        Raises:
            Exception: the failure that came first; a worker that only lost its neighbour does not count as first.
        """
        for future in self._futures:
            self._watch(future)  # the future wakes this thread before it calls `_notice`
        if self._errors:
            raise first_cause(self._errors)
        return [future.result() for future in self._futures]

    def fail(self, error: BaseException) -> None:
        """Take note of a failure, and end the operation on the other workers."""
        with self._lock:
            if any(error is known for known in self._errors):
                return
            self._errors.append(error)
            is_first = len(self._errors) == 1
        if is_first:
            self._abort(f"the operation failed on another stage: {headline(error)[:_MOST_SAID]}")

    def _notice(self, future: "Future[Report]") -> None:
        """In the thread that has read the reply: others wait for it to read on."""
        self._ends.append(time.monotonic())
        if future.exception() is not None:
            self._watchers.submit(self._watch_aside, future)

    def _watch_aside(self, future: "Future[Report]") -> None:
        try:
            self._watch(future)
        except Exception:  # the thread is for further failures, too
            _log.exception("after a failure the other workers could not be freed from waiting")

    def _watch(self, future: "Future[Report]") -> None:
        error = future.exception()
        if error is not None:
            self.fail(error)


def first_cause(errors: Sequence[BaseException]) -> BaseException:
    """The first one; a worker that only lost its neighbour does not count as first.

    Of stages that all met numbers that are not finite, the one that made them: which one says so first is chance.
    """
    located = [error for error in errors if isinstance(error, NonFiniteError)]
    if located:
        return min(located, key=lambda error: error.order)
    return next((error for error in errors if not isinstance(error, Unavailable)), errors[0])
