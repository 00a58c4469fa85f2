"""Detect threads that wait in torch.distributed: in a collective, at a rendezvous, in a backward that waits for one.

torch does not report such a wait, and gives up only after half an hour. But the kernel counts how long each thread has
run: a thread that has not run at all between two looks waits for something. Only processes that use torch.distributed
are examined. Threads with the innermost frame in lp_pipe or the standard library are skipped: they wait for calls,
locks, queues and sockets.
"""

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from lp_pipe.telemetry.tracebacks import owner_of

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
