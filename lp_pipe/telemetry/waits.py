"""A record of what each thread of this process waits for and which call it serves.

    with waits.waiting("call", target, "step"):   # only around an operation that may block
        ...

Costs a third of a microsecond: two writes into a dict by thread. All other work happens in `look`, which only the watch
for hangs calls (launch/hangs/hang_watch.py), every few seconds.
"""

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from time import monotonic
from types import FrameType, TracebackType
from typing import NamedTuple

from lp_pipe.context import NodeContext, context_of_thread, current_context
from lp_pipe.telemetry.tracebacks import is_of_user, owner_of

# Kinds of activities: MAIN is a node's own code (run, a constructor), HANDLER a call that it serves; others are waits.
MAIN, HANDLER, CALL, RESOLVE, RECEIVE, SEND = "main", "handler", "call", "resolve", "receive", "send"
IDLE = "idle"  # the node's own code has ended, and the node serves calls until the stop
DEBUGGER = "debugger"  # the node's code waits at a debugger's prompt; `what` says where
# A wait for other ranks: of a collective operation, or in torch.distributed, which is not recorded but detected
# (`find_standstill`).
RANKS = "ranks"
OUTSIDE = "outside"  # a call of something that is no node, such as an agent's environment, which should return soon
WAITS = (CALL, RESOLVE, RECEIVE, SEND, RANKS, OUTSIDE)


@dataclass
class Target:
    """A server, or the other end of a channel. peer: the name of its node, once that is known."""

    endpoint: str = ""
    address_id: str = ""
    peer: str = ""


class waiting:  # not @contextmanager, which costs five times as much
    """A context around a wait or a handler of the calling thread. Contexts nest, as calls of inline servers do.

    what: the method, or the channel. ends: whether the wait has a deadline.
    """

    __slots__ = ("ends", "kind", "node", "outer", "since", "target", "what")

    def __init__(
        self, kind: str, target: Target, what: str = "", ends: bool = False, node: NodeContext | None = None
    ) -> None:
        self.kind = kind
        self.target = target
        self.what = what
        self.ends = ends
        self.node = node

    def __enter__(self) -> None:
        ident = get_ident()
        self.outer: waiting | None = _innermost.get(ident)
        self.since = monotonic()
        _innermost[ident] = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.outer is None:
            del _innermost[get_ident()]
        else:
            _innermost[get_ident()] = self.outer


class awaiting(waiting):
    """A context around a wait of a coroutine, which occupies no thread."""

    __slots__ = ()

    def __enter__(self) -> None:
        self.outer = None
        self.node = current_context()
        self.since = monotonic()
        _awaited[id(self)] = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del _awaited[id(self)]


_innermost: dict[int, waiting] = {}  # by thread
_awaited: dict[int, waiting] = {}


def record_with(record: Callable[[waiting], object] | None) -> None:
    """Call `record` at the end of each wait and handler of a thread, from now on; None: no more.

    The method is replaced, so that waits which are not recorded pay nothing for it.
    """
    if record is None:
        waiting.__exit__ = _plain_exit  # type: ignore[method-assign]
        return

    def recorded_exit(
        self: waiting, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        record(self)
        _plain_exit(self, kind, error, trace)

    waiting.__exit__ = recorded_exit  # type: ignore[method-assign]


_plain_exit = waiting.__exit__


def open_waits() -> list[tuple[int, waiting]]:
    """Return the waits and handlers that have not ended, with their threads, outermost first."""
    return [(ident, one) for ident, last in dict(_innermost).items() for one in reversed(list(_outwards(last)))]


def node_of(ident: int) -> NodeContext | None:
    """Return the node of a thread."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    return context_of_thread(threads.get(ident))


class Activity(NamedTuple):
    """A wait or a handler of a thread.

    node: the node that runs the code; filled in by the reader, which knows the program. "" for the launcher.
    thread: its ident; a coroutine counts as a thread of its own.
    started: time.monotonic(); with `thread` it identifies the activity within its process.
    place: the line of user code, "train.py:41 in step"; only of a thread's innermost activity, and not of young ones.
    """

    node: str
    kind: str
    thread: int
    started: float
    age_s: float
    endpoint: str
    address_id: str
    peer: str
    what: str
    ends: bool
    place: str

    @property
    def is_wait(self) -> bool:
        return self.kind in WAITS


class PoolStatus(NamedTuple):
    """The state of a server's thread pool.

    size: 0 for an inline server. active: calls in progress, with or without a thread. quick: methods that need none.
    """

    endpoint: str
    size: int
    active: int
    quick: tuple[str, ...]


_pools: dict[str, "weakref.WeakMethod[Callable[[], PoolStatus]]"] = {}


def add_pool(endpoint: str, describe: Callable[[], PoolStatus]) -> None:
    """Register a server that listens now; `describe` must be a bound method, of which a weak reference is kept."""
    _pools[endpoint] = weakref.WeakMethod(describe)


def remove_pool(endpoint: str) -> None:
    _pools.pop(endpoint, None)


def pools() -> list[PoolStatus]:
    """Return the state of all servers of this process."""
    found = [(endpoint, reference()) for endpoint, reference in list(_pools.items())]
    return [describe() for _, describe in found if describe is not None]


def look(old_s: float) -> list[tuple[NodeContext | None, Activity]]:
    """Return the activities of all threads, outermost first, each with its node.

    old_s: activities of at least this age also get their place in the user's code.
    """
    now = time.monotonic()
    innermost = dict(_innermost)  # atomic: dict() of a dict runs no Python code
    frames = sys._current_frames() if any(now - one.since >= old_s for one in innermost.values()) else {}
    threads = {thread.ident: thread for thread in threading.enumerate()}
    found: list[tuple[NodeContext | None, Activity]] = []
    for ident, last in innermost.items():
        place = place_of(frames.get(ident)) if now - last.since >= old_s else ""
        node = context_of_thread(threads.get(ident))
        outwards = list(_outwards(last))
        ranks = [one for one in outwards if one.kind == RANKS]
        if ranks:  # what a collective operation waits for inside, such as a channel, says less
            last = ranks[-1]
            outwards = outwards[outwards.index(last) :]
        for one in reversed(outwards):
            node = one.node or node
            found.append((node, _described(one, ident, now, place if one is last else "")))
        still = find_standstill(threads.get(ident), frames.get(ident)) if last.kind in (MAIN, HANDLER) else None
        if still is not None:
            found.append((node, _standing(still, ident, now, place)))
    found += [(one.node, _described(one, number, now, "")) for number, one in dict(_awaited).items()]
    return found


def _described(one: waiting, thread: int, now: float, place: str) -> Activity:
    return Activity(
        node="",
        kind=one.kind,
        thread=thread,
        started=one.since,
        age_s=now - one.since,
        endpoint=one.target.endpoint,
        address_id=one.target.address_id,
        peer=one.target.peer,
        what=one.what,
        ends=one.ends,
        place=place,
    )


def place_of(frame: FrameType | None) -> str:
    """Return the innermost line of user code, such as "train.py:41 in step"; "" if there is none."""
    while frame is not None:
        code = frame.f_code
        if is_of_user(code.co_filename):
            return f"{_shown(Path(code.co_filename))}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def _shown(path: Path) -> Path:
    """Return the path relative to the current folder, if it is below it."""
    with contextlib.suppress(OSError, ValueError):  # the current folder was removed, or is elsewhere
        return path.relative_to(Path.cwd())
    return path


def _outwards(one: waiting | None) -> Iterator[waiting]:
    while one is not None:
        yield one
        one = one.outer


# Detect threads that wait in torch.distributed: in a collective, at a rendezvous, in a backward that waits for one.
#
# torch does not report such a wait, and gives up only after half an hour. But the kernel counts how long each thread
# has run: a thread that has not run at all between two looks waits for something. Only processes that use
# torch.distributed are examined. Threads with the innermost frame in lp_pipe or the standard library are skipped: they
# wait for calls, locks, queues and sockets.

_TORCH_DISTRIBUTED = "/torch/distributed/"
_WRAPPERS = ("c10d_logger.py", "_contextlib.py")  # decorators around torch's collectives


class Standstill(NamedTuple):
    """A thread that has not run since an earlier look.

    since: time.monotonic() of that look. what: torch's function, such as "all_reduce()"; "" in user code.
    """

    since: float
    what: str


_ran: dict[int, tuple[str, float]] = {}  # by thread ident: its run time, and when that value was first seen


def find_standstill(thread: threading.Thread | None, frame: FrameType | None) -> Standstill | None:
    """Return where the thread has waited since an earlier call; None if it runs, or waits for something else."""
    if thread is None or thread.ident is None or frame is None or not _may_wait_for_ranks(frame):
        return None
    ran = _time_run(thread)
    before, since = _ran.get(thread.ident, ("", 0.0))
    if ran and ran == before:
        return Standstill(since, _torch_call(frame))
    _ran[thread.ident] = ran, time.monotonic()
    return None


def _may_wait_for_ranks(frame: FrameType) -> bool:
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    if torch is None or owner_of(frame.f_code.co_filename) in ("lp_pipe", "the standard library"):
        return False
    return torch.is_initialized() or _is_of_torch_distributed(frame)


def _is_of_torch_distributed(frame: FrameType | None) -> bool:
    while frame is not None:
        if _TORCH_DISTRIBUTED in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _torch_call(frame: FrameType | None) -> str:
    """Return the function that the user's innermost line has called; torch.distributed's, if one is in the stack."""
    found: list[FrameType] = []
    while frame is not None and owner_of(frame.f_code.co_filename) is not None:
        if not frame.f_code.co_filename.endswith(_WRAPPERS):
            found.append(frame)
        frame = frame.f_back
    distributed = [one for one in found if _TORCH_DISTRIBUTED in one.f_code.co_filename]
    return f"{(distributed or found)[-1].f_code.co_name}()" if found else ""


def _time_run(thread: threading.Thread) -> str:
    """Return the thread's nanoseconds on a core and its number of time slices; "" if the kernel does not tell."""
    # After a fork the main thread's native_id is still that of the parent process.
    number = os.getpid() if thread is threading.main_thread() else thread.native_id
    try:
        on_core_ns, _, turns = Path(f"/proc/self/task/{number}/schedstat").read_text().split()
    except (OSError, ValueError):
        return ""
    return f"{on_core_ns} {turns}"


def _standing(still: Standstill, thread: int, now: float, place: str) -> Activity:
    return Activity("", RANKS, thread, still.since, now - still.since, "", "", "", still.what, False, place)
