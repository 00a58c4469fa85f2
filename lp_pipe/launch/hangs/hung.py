"""The nodes that make no progress: what `Program.group(on_hang=…)` kills."""

from collections.abc import Collection, Iterator

from lp_pipe.launch.hangs.deadlocks import find_deadlocks
from lp_pipe.launch.hangs.hang_text import silence_text, wait_text
from lp_pipe.launch.hangs.situation import Situation, Thread, Wait
from lp_pipe.telemetry.waits import DEBUGGER, RANKS

# A handler begins a moment after the wait of its caller; one that is much younger has only just taken the call.
_SHARE_OF_WAIT = 0.75


def find_hung(situation: Situation, candidates: Collection[str]) -> dict[str, str]:
    """Return the candidates (node_ids) that have made no progress for the limit, each with the reason in words.

    A node hangs if its process does not answer, if another node waits for it while it waits for no other node itself,
    or if it is part of a certain deadlock (of which one candidate is enough: its end lets the others go on). A call
    whose handler holds no thread (async, batched, a Future) never counts: what the handler waits for is not known. A
    node that stands in a debugger never counts either.
    """
    hung = {view.node: f"its {silence_text(view)}" for view in situation.silent if view.node in candidates}
    for cycle in find_deadlocks(situation):
        nodes = [wait.activity.node for wait in cycle if wait.activity.node in candidates]
        if nodes and not hung.keys() & set(nodes):
            hung[nodes[0]] = f"it is part of a deadlock: {wait_text(situation, cycle[0], ())}"
    for wait in situation.waits:
        for node, threads in _waited_for(situation, wait):
            if node in candidates and node not in hung and _is_stuck(situation, threads):
                hung[node] = wait_text(situation, wait, ())
    return hung


def _waited_for(situation: Situation, wait: Wait) -> Iterator[tuple[str, list[Thread]]]:
    """Yield each node that may end the wait, with its threads that have to go on for that."""
    if wait.activity.kind != RANKS:
        yield situation.owner(wait.activity), situation.workers(wait.activity)
        return
    label = wait.node.rpartition("/")[0]
    for node in situation.states:
        if node.rpartition("/")[0] == label and node != wait.activity.node:
            yield node, situation.mains(node)


def _is_stuck(situation: Situation, threads: list[Thread]) -> bool:
    since_s = _SHARE_OF_WAIT * situation.limit_s
    return bool(threads) and all(
        not thread.last.is_wait and thread.last.kind != DEBUGGER and thread.last.age_s >= since_s for thread in threads
    )
