"""Ctrl+C and SIGTERM at the launcher: once, an ordered stop; twice, the end at once."""

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Signal handlers of one run: installed only from the main thread, restored when the run is over.

    A signal raises KeyboardInterrupt in the main thread, wherever it is; `wait()` and the `with` body let it pass on
    once the nodes are down. The second one, raised inside the stop, makes that wait no longer.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._is_over = False
        self.received: int | None = None

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)

    def uninstall(self) -> None:
        """Restore the handlers; only the main thread can, until then they pass signals on to the earlier ones."""
        self._is_over = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_over:
            self.received = self.received or number
            raise KeyboardInterrupt(f"received {signal.Signals(number).name}")
        before = self._before[signal.Signals(number)]
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
