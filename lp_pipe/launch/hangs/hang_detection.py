"""Find deadlocks, cycles of waits and nodes without progress in a WaitGraph.

A wait ends when one of certain threads goes on. A call waits for the thread that runs its handler or, while all threads
of the server's pool are busy, for any of them. A server that is not up waits for its node's own code.

A deadlock is reported only if it is certain. The search begins with all waits and removes those that something may
still end, until nothing changes. What is left waits for itself. (A greatest fixed point, as for deadlocks in AND-OR
graphs.)
"""

from collections.abc import Collection, Iterable, Iterator

from lp_pipe.launch.hangs.hang_text import silence_text, wait_text
from lp_pipe.launch.hangs.wait_graph import ThreadActivities, Wait, WaitGraph
from lp_pipe.telemetry.waits import CALL, DEBUGGER, RANKS, RESOLVE

# A handler starts a moment after its caller's wait. One that is much younger than the wait has only just started.
_SHARE_OF_WAIT = 0.75


def find_deadlocks(graph: WaitGraph) -> list[list[Wait]]:
    """Return cycles of waits that only the end of a node can end: each waits for the next, the last for the first."""
    stuck = _stuck(graph)
    cycles: list[list[Wait]] = []
    for thread in stuck:
        if not any(thread is wait.thread for cycle in cycles for wait in cycle):
            cycle = _walk(graph, thread, stuck)
            if not any(cycle[0] in known for known in cycles):
                cycles.append(cycle)
    return cycles


def find_suspects(graph: WaitGraph) -> list[list[Wait]]:
    """Return long waits that lead back to the same node, but that a free thread may still end."""
    cycles: list[list[Wait]] = []
    for wait in graph.waits:
        cycle = _path_back(graph, [wait])
        if cycle and not any({one.key for one in cycle} & {one.key for one in known} for known in cycles):
            cycles.append(cycle)
    return cycles


def _stuck(graph: WaitGraph) -> list[ThreadActivities]:
    stuck = [wait.thread for wait in graph.long_waits_of(graph.threads)]
    while True:
        left = [thread for thread in stuck if _is_stuck(graph, thread, stuck)]
        if len(left) == len(stuck):
            return left
        stuck = left


def _is_stuck(graph: WaitGraph, thread: ThreadActivities, stuck: list[ThreadActivities]) -> bool:
    workers = _known_workers(graph, thread)
    return bool(workers) and all(worker in stuck for worker in workers)


def _known_workers(graph: WaitGraph, thread: ThreadActivities) -> list[ThreadActivities]:
    """Return all threads that may end the wait; empty if threads that are not in the graph may end it, too."""
    wait = thread.last
    if wait.ends:
        return []
    if wait.kind == RESOLVE:
        is_coming = graph.states.get(graph.owner(wait)) in ("starting", "running")
        return graph.workers(wait) if is_coming and not graph.is_up(wait) else []
    pool = graph.pools.get(wait.endpoint)
    if wait.kind != CALL or pool is None or wait.what in pool.quick:
        return []
    if pool.active != len(graph.handlers(wait.endpoint)):  # its handler may be a Future, a batch or a coroutine
        return []
    return graph.workers(wait)


def _walk(graph: WaitGraph, thread: ThreadActivities, stuck: Iterable[ThreadActivities]) -> list[Wait]:
    """Follow the waits from one stuck thread to the next until a thread repeats; return that cycle."""
    path = [thread]
    while True:
        following = next(worker for worker in graph.workers(path[-1].last) if worker in stuck)
        if following in path:
            return [Wait(one.last, one) for one in path[path.index(following) :]]
        path.append(following)


def _path_back(graph: WaitGraph, path: list[Wait]) -> list[Wait]:
    """Extend the path of waits until it is back at its first node; empty if it does not lead there."""
    owner = graph.owner(path[-1].activity)
    if owner == path[0].activity.node:
        return path if len(path) > 1 else []
    if not owner or any(owner == wait.activity.node for wait in path):
        return []
    for following in graph.long_waits_of(graph.workers(path[-1].activity)):
        if following.activity.node == owner and (found := _path_back(graph, [*path, following])):
            return found
    return []


def find_hung(graph: WaitGraph, candidates: Collection[str]) -> dict[str, str]:
    """Return the candidates (node_ids) that have made no progress for the limit, each with the reason in words.

    `Program.group(on_hang=...)` decides what becomes of them. A node hangs if its process does not answer, if another
    node waits for it while it waits for no node itself, or if it is part of a certain deadlock. Of a deadlock one
    candidate is enough, since its end lets the others go on. A call to a handler without a thread (async, batched, a
    Future) never counts, because what the handler waits for is unknown. A node that stands in a debugger never counts.
    """
    hung = {view.node: f"its {silence_text(view)}" for view in graph.silent if view.node in candidates}
    for cycle in find_deadlocks(graph):
        nodes = [wait.activity.node for wait in cycle if wait.activity.node in candidates]
        if nodes and not hung.keys() & set(nodes):
            hung[nodes[0]] = f"it is part of a deadlock: {wait_text(graph, cycle[0], ())}"
    for wait in graph.waits:
        for node, threads in _waited_for(graph, wait):
            if node in candidates and node not in hung and _make_no_progress(graph, threads):
                hung[node] = wait_text(graph, wait, ())
    return hung


def _waited_for(graph: WaitGraph, wait: Wait) -> Iterator[tuple[str, list[ThreadActivities]]]:
    """Yield each node that may end the wait, with those of its threads that must go on for that."""
    if wait.activity.kind != RANKS:
        yield graph.owner(wait.activity), graph.workers(wait.activity)
        return
    label = wait.node.rpartition("/")[0]
    for node in graph.states:
        if node.rpartition("/")[0] == label and node != wait.activity.node:
            yield node, graph.mains(node)


def _make_no_progress(graph: WaitGraph, threads: list[ThreadActivities]) -> bool:
    since_s = _SHARE_OF_WAIT * graph.limit_s
    return bool(threads) and all(
        not thread.last.is_wait and thread.last.kind != DEBUGGER and thread.last.age_s >= since_s for thread in threads
    )
