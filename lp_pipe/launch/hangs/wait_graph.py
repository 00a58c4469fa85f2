"""A snapshot of a program's threads that wait for another node, or serve one: which thread waits for which node."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lp_pipe.launch.supervision.messages import View
from lp_pipe.telemetry.waits import CALL, HANDLER, MAIN, RESOLVE, Activity, PoolStatus

LAUNCHER = "the launcher"
WaitKey = tuple[str, int, float]


class ThreadActivities(NamedTuple):
    """The activities of one thread, from the outermost to the innermost.

    process: the node_id of its process, since thread ids are unique only within one process.
    """

    process: str
    activities: tuple[Activity, ...]

    @property
    def last(self) -> Activity:
        """The innermost activity."""
        return self.activities[-1]

    def serves(self, endpoint: str, method: str | None = None) -> bool:
        """Return whether it runs a handler of the server (the handler `method`), at any depth."""
        return any(
            one.kind == HANDLER and one.endpoint == endpoint and method in (None, one.what) for one in self.activities
        )


class Wait(NamedTuple):
    """An activity that is a wait, with its thread."""

    activity: Activity
    thread: ThreadActivities

    @property
    def key(self) -> WaitKey:
        """Identifies this wait for as long as it lasts."""
        return self.thread.process, self.activity.thread, self.activity.started

    @property
    def node(self) -> str:
        return self.activity.node or LAUNCHER


def threads_of(view: View) -> list[ThreadActivities]:
    """Return the threads of one process, each with its activities from the outermost on."""
    found: dict[int, list[Activity]] = {}
    for one in view.activities:
        found.setdefault(one.thread, []).append(one)
    return [ThreadActivities(view.node, tuple(activities)) for activities in found.values()]


@dataclass(frozen=True)
class WaitGraph:
    """A snapshot of all threads that wait for a node or serve one.

    owners: address id -> node_id. states: node_id -> state, of all nodes. limit_s: the age from which a wait is long.
    unresponsive_after_s: a process that has sent nothing for so long counts as not answering.
    """

    views: list[View]
    owners: Mapping[str, str]
    states: Mapping[str, str]
    limit_s: float
    unresponsive_after_s: float

    @cached_property
    def threads(self) -> list[ThreadActivities]:
        """The threads of all processes that answer."""
        return [
            thread for view in self.views if view.silence_s < self.unresponsive_after_s for thread in threads_of(view)
        ]

    @cached_property
    def silent(self) -> list[View]:
        """The views of processes that should run but have not answered for the limit."""
        patience_s = max(self.limit_s, self.unresponsive_after_s)
        is_up = ("starting", "running")
        return [view for view in self.views if view.silence_s >= patience_s and self.states.get(view.node) in is_up]

    @cached_property
    def waits(self) -> list[Wait]:
        """All waits that are older than the limit, the oldest first."""
        found = [Wait(one, thread) for thread in self.threads for one in thread.activities if self._is_long(one)]
        return sorted(found, key=lambda wait: -wait.activity.age_s)

    @cached_property
    def pools(self) -> dict[str, PoolStatus]:
        return {pool.endpoint: pool for view in self.views for pool in view.pools}

    @property
    def positions(self) -> list[str]:
        """The positions of stage workers in their schedules, from all processes that answer."""
        return [text for view in self.views if view.silence_s < self.unresponsive_after_s for text in view.positions]

    def owner(self, activity: Activity) -> str:
        """Return the node_id that a wait is for; "" if it is unknown or not in this program."""
        for address in (activity.address_id, activity.endpoint.rpartition("/")[2]):
            if address in self.owners:
                return self.owners[address]
        return activity.peer if activity.peer in self.states else ""

    def unresponsive_view(self, node: str) -> View | None:
        """Return the last view of a node's process if it does not answer now; None if it does, or is a thread."""
        views = [view for view in self.views if view.node == node and view.silence_s >= self.unresponsive_after_s]
        return max(views, key=lambda view: view.silence_s, default=None)

    def is_up(self, activity: Activity) -> bool:
        """Return whether the server that a wait is for listens."""
        if activity.endpoint:
            return activity.endpoint in self.pools
        return any(endpoint.endswith(f"/{activity.address_id}") for endpoint in self.pools)

    def workers(self, activity: Activity) -> list[ThreadActivities]:
        """Return the threads of which one must go on before this wait can end."""
        if activity.kind == RESOLVE:
            return self.mains(self.owner(activity))
        if activity.kind != CALL:
            return [thread for thread in self.threads if self._is_code_of(thread, self.owner(activity))]
        at_it = self.handlers(activity.endpoint, activity.what)
        return self.handlers(activity.endpoint) if self.is_full(activity.endpoint) else at_it

    def handlers(self, endpoint: str, method: str | None = None) -> list[ThreadActivities]:
        return [thread for thread in self.threads if thread.serves(endpoint, method)]

    def mains(self, node: str) -> list[ThreadActivities]:
        """Return the threads that run the node's own code."""
        return [
            thread for thread in self.threads if any(one.kind == MAIN and one.node == node for one in thread.activities)
        ]

    def is_full(self, endpoint: str) -> bool:
        """Return whether every thread of the server's pool runs a handler."""
        pool = self.pools.get(endpoint)
        return pool is not None and 0 < pool.size <= len(self.handlers(endpoint))

    def long_waits_of(self, threads: Iterable[ThreadActivities]) -> Iterator[Wait]:
        for thread in threads:
            if self._is_long(thread.last):
                yield Wait(thread.last, thread)

    def _is_long(self, activity: Activity) -> bool:
        return activity.is_wait and activity.age_s >= self.limit_s

    @staticmethod
    def _is_code_of(thread: ThreadActivities, node: str) -> bool:
        return any(one.kind in (MAIN, HANDLER) and one.node == node for one in thread.activities)
