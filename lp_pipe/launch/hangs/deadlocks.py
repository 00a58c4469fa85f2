"""Which waits can never end: found in a Situation, and only said when it is sure.

A wait is over when one of some threads goes on: a call waits for the thread that runs its handler, or, while all
threads of the pool are taken, for any of them; a server that is not up waits for its node's own code. So we begin with
all waits and take away those that something may still end, until nothing changes; what is left waits for itself.
(A greatest fixed point, as for deadlocks in AND-OR graphs.)
"""

from collections.abc import Iterable

from lp_pipe.launch.hangs.situation import Situation, Thread, Wait
from lp_pipe.telemetry.waits import CALL, RESOLVE


def find_deadlocks(situation: Situation) -> list[list[Wait]]:
    """Cycles of waits that nothing can end but the end of a node; each wait is for the next, the last for the first."""
    stuck = _stuck(situation)
    cycles: list[list[Wait]] = []
    for thread in stuck:
        if not any(thread is wait.thread for cycle in cycles for wait in cycle):
            cycle = _walk(situation, thread, stuck)
            if not any(cycle[0] in known for known in cycles):
                cycles.append(cycle)
    return cycles


def find_suspects(situation: Situation) -> list[list[Wait]]:
    """Long waits that lead through other nodes back to the same node, though a free thread may still end them."""
    cycles: list[list[Wait]] = []
    for wait in situation.waits:
        cycle = _path_back(situation, [wait])
        if cycle and not any({one.key for one in cycle} & {one.key for one in known} for known in cycles):
            cycles.append(cycle)
    return cycles


def _stuck(situation: Situation) -> list[Thread]:
    stuck = [wait.thread for wait in situation.long_waits_of(situation.threads)]
    while True:
        left = [thread for thread in stuck if _is_stuck(situation, thread, stuck)]
        if len(left) == len(stuck):
            return left
        stuck = left


def _is_stuck(situation: Situation, thread: Thread, stuck: list[Thread]) -> bool:
    workers = _known_workers(situation, thread)
    return bool(workers) and all(worker in stuck for worker in workers)


def _known_workers(situation: Situation, thread: Thread) -> list[Thread]:
    """All threads that may end the wait; empty when there may be others than those that are seen."""
    wait = thread.last
    if wait.ends:
        return []
    if wait.kind == RESOLVE:
        is_coming = situation.states.get(situation.owner(wait)) in ("starting", "running")
        return situation.workers(wait) if is_coming and not situation.is_up(wait) else []
    pool = situation.pools.get(wait.endpoint)
    if wait.kind != CALL or pool is None or wait.what in pool.quick:
        return []
    if pool.active != len(situation.handlers(wait.endpoint)):  # a Future, a batch or a coroutine may be its handler
        return []
    return situation.workers(wait)


def _walk(situation: Situation, thread: Thread, stuck: Iterable[Thread]) -> list[Wait]:
    """From one that is stuck to the next, until one comes again."""
    path = [thread]
    while True:
        following = next(worker for worker in situation.workers(path[-1].last) if worker in stuck)
        if following in path:
            return [Wait(one.last, one) for one in path[path.index(following) :]]
        path.append(following)


def _path_back(situation: Situation, path: list[Wait]) -> list[Wait]:
    """The way on from the last wait to the node where the path began; empty when there is none."""
    owner = situation.owner(path[-1].activity)
    if owner == path[0].activity.node:
        return path if len(path) > 1 else []
    if not owner or any(owner == wait.activity.node for wait in path):
        return []
    for following in situation.long_waits_of(situation.workers(path[-1].activity)):
        if following.activity.node == owner and (found := _path_back(situation, [*path, following])):
            return found
    return []
