"""How many threads torch and BLAS compute with: set, so that several processes do not oversubscribe the cores."""

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_lock = threading.Lock()
_runs = 0
_undo: list[Callable[[], object]] = []


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
    """Set the count for threads that begin from now on, and leave that of the calling thread as it is.

    torch (OpenMP) keeps a count for the process, which each thread takes over when it first computes, and one for each
    thread. The run's end comes in another thread than its start, which could not undo the caller's own count.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        before = torch.get_num_threads()  # from now on the calling thread has its own
        yield partial(_in_a_thread, partial(torch.set_num_threads, before))
        _in_a_thread(partial(torch.set_num_threads, count))


def _use_in_blas(count: int) -> Iterator[Callable[[], object]]:
    """Its sums depend on how many threads add: without this a node had other bits as a thread than as a process."""
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

    For BLAS, because threadpoolctl lets only the first thread that changed OpenBLAS change it, until that has ended.
    """
    thread = threading.Thread(target=action, name="threads of BLAS")
    try:
        thread.start()
    except RuntimeError:  # out of threads
        action()
        return
    thread.join()
