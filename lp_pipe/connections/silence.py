"""Detection of a silent peer, in time that counts only while this process is awake to hear it.

A silence is a number of ticks, each of which this process must live through. A process that was frozen or starved for
long finds the peer's pings waiting. If the peer was frozen too (Slurm's suspend, a paused container), it gets time to
speak.
"""

import threading
from collections.abc import Callable

TICKS = 4


class SilenceWatch:
    """Calls `on_silence` once when nothing arrived for `timeout_s` while a thread was waiting to read.

    For carriers that do not limit the time of a read.
    """

    def __init__(self, timeout_s: float, on_silence: Callable[[], None], name: str) -> None:
        self._timeout_s = timeout_s
        self._on_silence = on_silence
        self._is_listening = False
        self._heard = 0
        self._is_ended = threading.Event()
        threading.Thread(target=self._watch, name=f"silence {name}", daemon=True).start()

    def listening(self) -> None:
        """Count silence from now on."""
        self._is_listening = True

    def heard(self) -> None:
        """Note that something arrived, and stop counting until `listening`."""
        self._is_listening = False
        self._heard += 1

    def end(self) -> None:
        self._is_ended.set()

    def _watch(self) -> None:
        silent_ticks, heard = 0, -1
        while not self._is_ended.wait(self._timeout_s / TICKS):
            is_silent = self._is_listening and self._heard == heard
            silent_ticks = silent_ticks + 1 if is_silent else 0
            heard = self._heard
            if silent_ticks == TICKS:
                self._on_silence()
                return
