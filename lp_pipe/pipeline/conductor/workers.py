"""All workers of a pipeline, as the conductor calls them: commands to several at a time, and their failures."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic

from lp_pipe.context import context
from lp_pipe.errors import NonFiniteError, Unavailable
from lp_pipe.pipeline.protocol import Abort, Command, Discard, Reply, WorkerClient
from lp_pipe.pipeline.worker.worker import StageWorker
from lp_pipe.rpc import CourierClient
from lp_pipe.rpc.calls import add_quick_callback
from lp_pipe.rpc.daemon_pool import DaemonPool
from lp_pipe.rpc.remote_error import headline

_MOST_SAID = 1000  # characters of a failure that is told to workers which only end because of it

_log = logging.getLogger(__name__)


class Workers:
    """All workers by rank: `own`, which is in this process, and clients of the others."""

    def __init__(self, own: StageWorker, peers: Sequence[CourierClient]) -> None:
        self.own = own
        self._peers = [WorkerClient(peer) for peer in peers]
        self._tag = 0
        self._pool = DaemonPool(1, "steps ahead")
        self._watchers = DaemonPool(1, "failed operations")
        for pool in (self._pool, self._watchers):
            context().exit_stack.callback(pool.close)

    def clients(self, own: CourierClient) -> list[WorkerClient]:
        """Return clients of all workers, by rank. own: a client of this process's node."""
        return [WorkerClient(own), *self._peers]

    def new_tag(self) -> int:
        """Return the number of a new operation, which is higher than all before."""
        self._tag += 1
        return self._tag

    def some(self, ranks: Sequence[int], command: Command[Reply]) -> list[Reply]:
        """Give a command to these workers, all at the same time; returns their replies. Rank 0 is the first."""
        return self.each(ranks, [command] * len(ranks))

    def each(self, ranks: Sequence[int], commands: "Sequence[Command[Reply]]") -> list[Reply]:
        """Give each of these workers a command of its own, as `some` does."""
        assert ranks[0] == 0, f"rank 0 is not the first of {ranks}"
        pairs = zip(ranks[1:], commands[1:], strict=True)
        futures = [self._peers[rank - 1].start(command, "caller") for rank, command in pairs]
        try:
            results = [self.own.do(commands[0])]
        finally:
            for future in futures:
                future.exception()  # unlike concurrent.futures.wait this reads the reply, and at once
        return results + [future.result() for future in futures]

    def all(self, command: Command[Reply]) -> list[Reply]:
        """Give a command to every worker; returns their replies when all of them have done it."""
        return self.some(range(len(self._peers) + 1), command)

    def run(self, command_for: "Callable[[int, int], Command[Reply]]") -> list[Reply]:
        """Run one operation on every rank; when one fails, free the others from waiting for it.

        command_for: of the operation's tag, and of the rank.

        Raises:
            Exception: the failure that came first; a worker that only lost its neighbour does not count as first.
        """
        tag = self.new_tag()
        attempt = self._attempt(tag, self._start(lambda rank: command_for(tag, rank)))
        try:
            own = self.own.do(command_for(tag, 0))
        except BaseException as error:  # kept as the reason of the whole operation, raised below
            attempt.fail(error)
        try:
            others = attempt.replies()
        except BaseException:
            self.discard()
            raise
        return [own, *others]

    def begin(self, tag: int, command_for: "Callable[[int], Command[Reply]]") -> "Attempt[Reply]":
        """Begin an operation on every rank, perhaps before another has ended; after a failure call `discard`.

        tag: the highest of those that the operation waits for. command_for: of the rank.
        """
        peers = self._start(command_for)
        own = self._pool.start(lambda: self.own.do(command_for(0)))
        return self._attempt(tag, [own, *peers])

    def discard(self) -> None:
        """Let all workers forget what the last operation, a failed one, has left, once no worker is at it any more."""
        with contextlib.suppress(Unavailable):  # a worker that has died is the cause, or comes after it
            self.all(Discard(self._tag))

    def _start(self, command_for: "Callable[[int], Command[Reply]]") -> "list[Future[Reply]]":
        return [_started(peer, command_for, rank) for rank, peer in enumerate(self._peers, start=1)]

    def _attempt(self, tag: int, futures: "Sequence[Future[Reply]]") -> "Attempt[Reply]":
        def abort(reason: str) -> None:
            command = Abort(tag, reason)
            self.own.do(command)
            for peer in self._peers:
                peer.start(command, "thread")

        return Attempt(abort, futures, self._watchers)


def _started(peer: WorkerClient, command_for: "Callable[[int], Command[Reply]]", rank: int) -> "Future[Reply]":
    """Send a command. One that cannot be sent (it does not pickle) has failed: the ranks before must be freed."""
    try:
        future = peer.start(command_for(rank), "thread")
    except BaseException as error:
        future = Future()
        future.set_exception(error)
    return future


class Attempt(Generic[Reply]):
    """The replies to an operation, or its failures, the first of which frees all workers.

    watchers: threads that handle failures before `replies` is called.
    """

    def __init__(self, abort: Callable[[str], None], futures: "Sequence[Future[Reply]]", watchers: DaemonPool) -> None:
        self._abort = abort
        self._futures = futures
        self._watchers = watchers
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._ends: list[float] = []  # of each future
        for future in futures:
            add_quick_callback(future, self._notice)

    def ended(self) -> float:
        """Return when the last reply came, in time.monotonic() seconds; after `replies`, which may be much later."""
        now = time.monotonic()  # first, so that it is never after the end of the operation behind this one
        # A future wakes the waiting thread before it calls `_notice`: then the reply came now.
        return max(self._ends) if len(self._ends) == len(self._futures) else now

    def failure(self) -> BaseException | None:
        """Return what `replies` raises, or None."""
        try:
            self.replies()
        except BaseException as error:
            return error
        return None

    def replies(self) -> list[Reply]:
        """Wait for all replies.

        Raises:
            Exception: the failure that came first; a worker that only lost its neighbour does not count as first.
        """
        for future in self._futures:
            self._watch(future)  # the future wakes this thread before it calls `_notice`
        if self._errors:
            raise first_cause(self._errors)
        return [future.result() for future in self._futures]

    def fail(self, error: BaseException) -> None:
        """Note a failure; the first one ends the operation on the other workers."""
        with self._lock:
            if any(error is known for known in self._errors):
                return
            self._errors.append(error)
            is_first = len(self._errors) == 1
        if is_first:
            self._abort(f"the operation failed on another stage: {headline(error)[:_MOST_SAID]}")

    def _notice(self, future: "Future[Any]") -> None:
        """Take note of a reply, in the thread that has read it: other threads wait for it to read on."""
        self._ends.append(time.monotonic())
        if future.exception() is not None:
            self._watchers.submit(self._watch_aside, future)

    def _watch_aside(self, future: "Future[Any]") -> None:
        try:
            self._watch(future)
        except Exception:  # the thread has to handle further failures, too
            _log.exception("after a failure the other workers could not be freed from waiting")

    def _watch(self, future: "Future[Any]") -> None:
        error = future.exception()
        if error is not None:
            self.fail(error)


def first_cause(errors: Sequence[BaseException]) -> BaseException:
    """Return the first failure; a worker that only lost its neighbour does not count as first.

    If several stages met numbers that are not finite, it is the stage that made them, whichever reported first.
    """
    located = [error for error in errors if isinstance(error, NonFiniteError)]
    if located:
        return min(located, key=lambda error: error.order)
    return next((error for error in errors if not isinstance(error, Unavailable)), errors[0])
