"""Changes of a state that are interrupted, as those that the main thread makes may be."""

import pytest

from lp_pipe.launch.coordination.directory import Settlement, SettlingLock


def test_a_signal_at_the_end_of_a_change_is_raised_and_leaves_the_lock_free() -> None:
    """An UnboundLocalError came in its place."""

    def settle() -> list[Settlement]:
        raise KeyboardInterrupt

    settling = SettlingLock(settle)
    with pytest.raises(KeyboardInterrupt), settling.changing():
        pass
    assert settling.lock.acquire(blocking=False)
