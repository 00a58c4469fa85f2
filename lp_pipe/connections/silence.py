"""Detection of a silent peer, in time that counts only while this process is awake to hear it.

A silence is a number of ticks, each of which this process must live through. A process that was frozen or starved for
long finds the peer's pings waiting. If the peer was frozen too (Slurm's suspend, a paused container), it gets time to
speak.
"""

import threading
import time
from collections.abc import Callable

from lp_pipe.connections import io_thread

TICKS = 4


class SilenceWatch:
    """Calls `on_silence` once, in a thread, when nothing arrived for `timeout_s` while a thread was waiting to read.

    For carriers that do not limit the time of a read.
    """

    def __init__(self, timeout_s: float, on_silence: Callable[[], None], name: str) -> None:
        self._pause_s = timeout_s / TICKS
        self._on_silence = on_silence
        self._name = name
        self._is_listening = self._is_over = False
        self._heard = self._silent_ticks = 0
        self._heard_at_tick = -1
        io_thread.shared.at(time.monotonic() + self._pause_s, self._tick)

    def listening(self) -> None:
        """Count silence from now on."""
        self._is_listening = True

    def heard(self) -> None:
        """Note that something arrived, and stop counting until `listening`."""
        self._is_listening = False
        self._heard += 1

    def end(self) -> None:
        self._is_over = True

    def _tick(self) -> None:
        if self._is_over:
            return
        is_silent = self._is_listening and self._heard == self._heard_at_tick
        self._silent_ticks = self._silent_ticks + 1 if is_silent else 0
        self._heard_at_tick = self._heard
        if self._silent_ticks == TICKS:
            threading.Thread(target=self._on_silence, name=f"silence {self._name}", daemon=True).start()
        else:
            io_thread.shared.at(time.monotonic() + self._pause_s, self._tick)
