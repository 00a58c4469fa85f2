"""Signals as messages call them."""

import signal


def signal_name(number: int) -> str:
    """SIGKILL, or "signal 40" of one without a name: real-time signals have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
