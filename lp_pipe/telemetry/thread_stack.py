"""Where a thread is, for warnings about one that does not end."""

import sys
import threading
import traceback


def stack_of(thread: threading.Thread) -> str:
    """Its Python stack right now; in words where it has none, because it has ended meanwhile."""
    frame = sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None
    # Without a frame traceback would give the stack of the caller.
    return "".join(traceback.format_stack(frame)) if frame is not None else "(it has just ended)"
