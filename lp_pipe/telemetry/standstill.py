"""Threads that stand still in torch.distributed: in a collective, at a rendezvous, in a backward that waits for one.

Nobody tells us of such a wait, and torch itself gives up after half an hour. But the kernel counts how long each thread
has run: one that has not run at all from one look to the next waits for something. Only processes that use
torch.distributed are looked at, and there no thread whose innermost frame is lp_pipe's or the standard library's: these
wait for calls, locks, queues and sockets.
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
_WRAPPERS = ("c10d_logger.py", "_contextlib.py")  # around each of torch's functions


class Standstill(NamedTuple):
    """since: time.monotonic, not earlier than the look before. what: of torch, "all_reduce()"; "": the user's code."""

    since: float
    what: str


_ran: dict[int, tuple[str, float]] = {}  # by thread: for how long it had run, and when that was seen first


def find_standstill(thread: threading.Thread | None, frame: FrameType | None) -> Standstill | None:
    """What it stands still in since an earlier call of this; None where it runs, or waits for something else."""
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
    """What the user's innermost line has called of torch; of torch.distributed, where that is on the way."""
    found: list[FrameType] = []
    while frame is not None and owner_of(frame.f_code.co_filename) is not None:
        if not frame.f_code.co_filename.endswith(_WRAPPERS):
            found.append(frame)
        frame = frame.f_back
    distributed = [one for one in found if _TORCH_DISTRIBUTED in one.f_code.co_filename]
    return f"{(distributed or found)[-1].f_code.co_name}()" if found else ""


def _time_run(thread: threading.Thread) -> str:
    """Nanoseconds on a core, and how often it was put on one; "" where the kernel does not say."""
    # A main thread's native_id is that of the process it was forked from.
    number = os.getpid() if thread is threading.main_thread() else thread.native_id
    try:
        on_core_ns, _, turns = Path(f"/proc/self/task/{number}/schedstat").read_text().split()
    except (OSError, ValueError):
        return ""
    return f"{on_core_ns} {turns}"
