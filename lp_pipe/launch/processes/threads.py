"""How many threads torch and BLAS compute with: set, so that several processes do not oversubscribe the cores."""

import sys
import threading

_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_lock = threading.Lock()
_runs = 0
_before = 0


def thread_environment(count: int) -> dict[str, str]:
    """What numerical libraries read when they are loaded."""
    # Left dynamic, MKL takes no more threads than there are cores, and a torch that is imported later asks MKL.
    return {**dict.fromkeys(_COUNTS, str(count)), "MKL_DYNAMIC": "FALSE"}


def set_process_threads(count: int) -> None:
    """Set the thread count of the libraries that are loaded now; later ones read OMP_NUM_THREADS."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)
    if "numpy" in sys.modules:
        from threadpoolctl import threadpool_limits

        threadpool_limits(count)


def use_threads(count: int) -> None:
    """Set torch's thread count for a program in this process; the last program to end restores it."""
    global _runs, _before
    torch = sys.modules.get("torch")
    with _lock:
        _runs += 1
        if torch is not None:
            if _runs == 1:
                _before = torch.get_num_threads()
            torch.set_num_threads(count)


def unset_threads() -> None:
    """Undo `use_threads`."""
    global _runs
    torch = sys.modules.get("torch")
    with _lock:
        _runs -= 1
        if torch is not None and _runs == 0 and _before:
            torch.set_num_threads(_before)
