"""Set how many threads torch and BLAS compute with, so that several processes do not oversubscribe the cores."""

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_lock = threading.Lock()
_runs = 0
_undo: list[Callable[[], object]] = []


def thread_environment(count: int) -> dict[str, str]:
    """Return the environment variables that numerical libraries read when they are loaded."""
    # With MKL_DYNAMIC, MKL would use at most as many threads as cores, and a later imported torch asks MKL.
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
    """Set the thread count of torch and BLAS for a program in this process; the last program to end restores it."""
    global _runs
    with _lock:
        _runs += 1
        undo = [*_use_in_torch(count), *_use_in_blas(count)]
        if _runs == 1:
            _undo[:] = undo


def unset_threads() -> None:
    """Undo `use_threads`."""
    global _runs
    with _lock:
        _runs -= 1
        while _runs == 0 and _undo:
            _undo.pop()()


def _use_in_torch(count: int) -> Iterator[Callable[[], object]]:
    """Set the count for threads that start from now on, but not for the calling thread.

    torch (OpenMP) keeps one count for the process, which each thread copies when it first computes, and one per thread.
    A run ends in another thread than it was started in, and that thread could not restore the caller's own count.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        before = torch.get_num_threads()  # also gives the calling thread its own count
        yield partial(_in_a_thread, partial(torch.set_num_threads, before))
        _in_a_thread(partial(torch.set_num_threads, count))


def _use_in_blas(count: int) -> Iterator[Callable[[], object]]:
    """Set BLAS's count. Its sums depend on it: a node would compute other bits as a thread than as a process."""
    if "numpy" not in sys.modules:
        return
    from threadpoolctl import ThreadpoolController

    for library in ThreadpoolController().select(user_api="blas").lib_controllers:
        before = library.num_threads
        if before != count:
            yield partial(_in_a_thread, partial(library.set_num_threads, before))
            _in_a_thread(partial(library.set_num_threads, count))


def _in_a_thread(action: Callable[[], object]) -> None:
    """Call `action` in a thread of its own, and wait for it.

    BLAS needs this, because threadpoolctl lets only the first thread that changed OpenBLAS change it while it lives.
    """
    thread = threading.Thread(target=action, name="threads of BLAS")
    try:
        thread.start()
    except RuntimeError:  # out of threads
        action()
        return
    thread.join()
