"""A timer that finds no thread does not keep later ones from being called; test_tls.py has silent hosts."""

import threading
import time
from typing import NoReturn

import pytest

from lp_pipe.connections.io_thread import IoThread


def test_once_there_are_threads_again_timers_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    # After one connection that found no thread, silent hosts were noticed on none that came later.
    def full(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    some, is_called = IoThread(), threading.Event()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(threading.Thread, "start", full)
        some.at(time.monotonic(), lambda: None)
    some.at(time.monotonic(), is_called.set)
    assert is_called.wait(10)
