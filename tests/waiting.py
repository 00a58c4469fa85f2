"""Wait for what no event tells: ask again and again."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], within_s: float = 30.0) -> T:
    """What it gives, once that counts as true. The default is for what comes at some time, or the test fails."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
    return found
