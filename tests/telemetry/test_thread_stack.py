"""Where a thread is."""

import threading

from lp_pipe.telemetry.thread_stack import stack_of


def test_a_threads_stack_is_its_own_and_not_the_callers() -> None:
    def wait_inside() -> None:
        is_inside.set()
        release.wait(20)

    is_inside, release = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_inside)
    thread.start()
    assert is_inside.wait(20)
    assert "in wait_inside" in stack_of(thread)
    release.set()
    thread.join()
    # Of one that ended while it was named, a warning showed where the one who warned was.
    assert stack_of(thread) == "(it has just ended)"
