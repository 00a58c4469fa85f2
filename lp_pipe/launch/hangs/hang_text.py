"""Messages about long waits: which node waits for which one, what that one does, and what the user can do."""

import shlex
from collections import Counter
from collections.abc import Sequence

from lp_pipe.launch.hangs.wait_graph import ThreadActivities, Wait, WaitGraph, threads_of
from lp_pipe.launch.supervision.messages import View
from lp_pipe.telemetry.names import name_list
from lp_pipe.telemetry.waits import CALL, DEBUGGER, HANDLER, OUTSIDE, RANKS, RECEIVE, RESOLVE, SEND, Activity

ENDED = ("finished", "failed", "stopped", "waiting")  # no code of such a node runs
_SHOWN_RANKS = 4


def wait_text(graph: WaitGraph, wait: Wait, others: Sequence[Wait]) -> str:
    """Describe a wait and what the awaited node does.

    others: waits of the same kind, which this text also covers.
    """
    waiter = "the launcher" if not wait.activity.node else f"node {wait.node}"
    text = f"{waiter} has waited {seconds(wait.activity.age_s)} for {_object(graph, wait.activity)}{_at(wait.activity)}"
    if others:
        names = [one.node for one in others]
        shown = ", ".join(dict.fromkeys(names[:3]))
        text += (
            f" (so {'has' if len(names) == 1 else 'have'} {len(names)} more: {shown}{', …' if len(names) > 3 else ''})"
        )
    if wait.activity.kind == RANKS:
        return f"{text}; {_other_ranks_text(graph, wait)}"
    if wait.activity.kind == OUTSIDE:
        return text
    return f"{text}; {owner_text(graph, wait.activity)}"


def short_text(graph: WaitGraph, wait: Wait) -> str:
    """Return the age and object of a wait, for a table."""
    return f"{seconds(wait.activity.age_s)} for {_object(graph, wait.activity)}"


def ended_text(graph: WaitGraph, wait: Wait) -> str:
    """Say that a wait has ended which `wait_text` or `cycle_text` had reported."""
    waiter = "the launcher" if not wait.activity.node else f"node {wait.node}"
    return f"{waiter} no longer waits for {_object(graph, wait.activity)}"


def cycle_text(graph: WaitGraph, cycle: Sequence[Wait], is_sure: bool, run: str) -> str:
    """Describe a cycle, one line for each wait, and what to do."""
    if is_sure:
        head = "deadlock: these waits are for each other, and none of them can end by itself:"
    else:
        head = "cycle of waits (may be a deadlock):"
    lines = [head, *(f"  {_cycle_line(graph, wait)}" for wait in cycle)]
    if not is_sure:
        lines.append(f"  {owner_text(graph, cycle[-1].activity)}")
    lines.append(f"To see every stack: lp_pipe stacks {shlex.quote(run)}. {_advice(graph, cycle)}")
    return "\n".join(lines)


def idle_text(graph: WaitGraph) -> str:
    """Say that only servers are left, and until when they serve."""
    ended = [node for node, state in graph.states.items() if state == "finished"]
    up = [node for node, state in graph.states.items() if state not in ENDED]
    has = "has" if len(ended) == 1 else "have"
    return (
        f"{name_list(ended)} {has} ended; only servers are left ({name_list(up)}): they serve until lp.stop(), which a "
        "node calls when its work is done, or until `lp_pipe stop`"
    )


def positions_text(graph: WaitGraph) -> str:
    """Return the position of each stage worker in its schedule, one per line."""
    return "\n".join(["where the stages are in their schedules:", *(f"  {text}" for text in graph.positions)])


def owner_text(graph: WaitGraph, activity: Activity) -> str:
    """Return what the awaited node does."""
    owner = graph.owner(activity)
    if not owner:
        return f"{_name(graph, activity)} is not a node of this program, or not connected"
    absence = _absence_text(graph, owner)
    if absence:
        return f"{owner}{absence}"
    if activity.kind == RESOLVE and not graph.is_up(activity):
        return f"{owner} is not up yet: {_code_text(graph, owner)}"
    return _worker_text(graph, activity, owner)


def _absence_text(graph: WaitGraph, node: str) -> str:
    """Return why it is unknown what the node's threads do; "" if it is known."""
    view = graph.unresponsive_view(node)
    if view is not None:
        return f"'s {silence_text(view)}"
    state = graph.states[node]
    return f" is {state}" if state == "restarting" or state in ENDED else ""


_STATES_OF_SILENT = {
    "T": "it is stopped (SIGSTOP)",
    "t": "it is stopped by a debugger",
    "R": "it computes in C code that holds Python's lock",
    "S": "it waits in C code that holds Python's lock",
    "D": "it waits in the kernel for a disk or a network file system",
}


def silence_text(view: View) -> str:
    """Return for how long a process has not answered, why, and what it was doing when it last answered."""
    if view.template:
        return (
            f"process is dead, and has not answered for {seconds(view.silence_s)}: its parent, the template process "
            f"{view.template}, has not reported that, so it is stopped (kill -CONT {view.template} lets it go on)"
        )
    why = _STATES_OF_SILENT.get(
        view.process_state, "it is stopped (SIGSTOP, a debugger), or inside C code that holds Python's lock"
    )
    doing = [_last_known_text(thread) for thread in threads_of(view) if not thread.last.is_wait]
    was = f"; when it last answered, it ran {', '.join(dict.fromkeys(doing[:3]))}" if doing else ""
    return f"process has not answered for {seconds(view.silence_s)}: {why}{was}"


def _last_known_text(thread: ThreadActivities) -> str:
    handler = _handler_of(thread)
    return (f"its handler {handler.what}()" if handler else "its own code") + _at(thread.last)


def _other_ranks_text(graph: WaitGraph, wait: Wait) -> str:
    """Return what other ranks of the process group do. What few ranks do comes first."""
    label = wait.node.rpartition("/")[0]
    ranks = [node for node in graph.states if node.rpartition("/")[0] == label]
    ranks += [other.node for other in graph.waits if other.activity.kind == RANKS]
    by_text: dict[str, list[str]] = {}
    for node in dict.fromkeys(ranks):
        if node != wait.node:
            by_text.setdefault(_rank_text(graph, node), []).append(node)
    parts = [
        f"{', '.join(nodes[:_SHOWN_RANKS])}{', …' if len(nodes) > _SHOWN_RANKS else ''}{text}"
        for text, nodes in sorted(by_text.items(), key=lambda item: len(item[1]))
    ]
    return "; ".join(parts[:_SHOWN_RANKS]) or "no other node of the program seems to take part"


def _rank_text(graph: WaitGraph, node: str) -> str:
    """Return what a rank does; the same text for ranks that do the same."""
    absence = _absence_text(graph, node)
    if absence:
        return absence
    threads = graph.mains(node)
    if not threads:
        return ": not running its own code yet"
    last = threads[0].last
    doing = f"waiting for {_object(graph, last)}" if last.is_wait else "running its own code"
    return f": {doing}{_at(last)}"


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


def _object(graph: WaitGraph, activity: Activity) -> str:
    if activity.kind == RANKS and activity.peer:
        return f"{activity.peer} to join {activity.what}"
    if activity.kind == RANKS:
        return f"other ranks, in torch's {activity.what}" if activity.what else "something outside of lp_pipe"
    if activity.kind == OUTSIDE:
        return f"{activity.peer} to return from {activity.what}"
    name = _name(graph, activity)
    if activity.kind == CALL:
        return f"a reply of {name}.{activity.what}()"
    if activity.kind == RESOLVE:
        return f"{name} to come up"
    if activity.kind == RECEIVE:
        return f"a message of {name} on {activity.what}"
    return f"{name} to take a message, on {activity.what}"


def _name(graph: WaitGraph, activity: Activity) -> str:
    return graph.owner(activity) or activity.peer or activity.endpoint or "a sender that has not connected yet"


def _at(activity: Activity) -> str:
    return f" (at {activity.place})" if activity.place else ""


def _code_text(graph: WaitGraph, node: str) -> str:
    """Return where the node's own code is: in its constructor or in run()."""
    threads = graph.mains(node)
    if not threads:
        return "its process has not started to run its code"
    return "; ".join(dict.fromkeys(_thread_text(graph, thread, "its own code") for thread in threads[:3]))


def _worker_text(graph: WaitGraph, activity: Activity, owner: str) -> str:
    if activity.kind in (RECEIVE, SEND):
        handlers = [thread for thread in graph.workers(activity) if _handler_of(thread) is not None]
        threads = handlers or graph.mains(owner)
        return f"{owner}: " + "; ".join(_thread_text(graph, thread, "its own code") for thread in threads[:3])
    threads = graph.handlers(activity.endpoint, activity.what)
    if threads:
        return f"{owner} {_thread_text(graph, threads[0], 'its own code')}"
    if graph.is_full(activity.endpoint):
        busy = Counter(one.what for one in map(_handler_of, graph.handlers(activity.endpoint)) if one is not None)
        shown = ", ".join(f"{count} x {method}()" for method, count in busy.most_common(4))
        first = _thread_text(graph, graph.handlers(activity.endpoint)[0], "its own code")
        return (
            f"all {sum(busy.values())} threads of {owner} are busy ({shown}), so the call has not started, or its "
            f"handler waits without a thread; one of them {first}"
        )
    return (
        f"no thread of {owner} runs this call: its handler is asynchronous, batched, or has returned a Future; "
        f"{_code_text(graph, owner)}"
    )


def _thread_text(graph: WaitGraph, thread: ThreadActivities, otherwise: str) -> str:
    """`runs its handler step() since 60 s (at train.py:41 in step)`."""
    handler, last = _handler_of(thread), thread.last
    what = f"runs its handler {handler.what}() since {seconds(handler.age_s)}" if handler else f"runs {otherwise}"
    if last.kind == DEBUGGER:
        return f"stands in a debugger at {last.what} (lp_pipe attach)"
    if last.is_wait:
        what += f", which itself waits for {_object(graph, last)} since {seconds(last.age_s)}"
    return f"{what}{_at(last)}"


def _handler_of(thread: ThreadActivities) -> Activity | None:
    """Return the innermost handler that the thread runs."""
    return next((one for one in reversed(thread.activities) if one.kind == HANDLER), None)


def _cycle_line(graph: WaitGraph, wait: Wait) -> str:
    activity = wait.activity
    handler = _handler_of(wait.thread)
    inside = f", in its handler {handler.what}()" if handler is not None else ""
    name = _name(graph, activity)
    what = f"{name}.{activity.what}()" if activity.kind == CALL else _object(graph, activity)
    taken = f"; all threads of {name} are busy" if activity.kind == CALL and graph.is_full(activity.endpoint) else ""
    return f"{wait.node} waits for {what} since {seconds(activity.age_s)}{inside}{_at(activity)}{taken}"


def _advice(graph: WaitGraph, cycle: Sequence[Wait]) -> str:
    full = [wait.activity for wait in cycle if graph.is_full(wait.activity.endpoint)]
    names = ", ".join(dict.fromkeys(_name(graph, activity) for activity in full))
    if names:
        return (
            f"With more threads for {names} (courier_kwargs={{'thread_pool_size': N}}) calls back can be served; with "
            "call_timeout such a wait ends with DeadlineExceeded."
        )
    if any(wait.activity.kind == RESOLVE for wait in cycle):
        return "Constructors must not call each other, because a node answers only once it is built: call from run()."
    return "With call_timeout such a wait ends with DeadlineExceeded."
