"""Names as messages show them: a list that stays one line, and signals by name."""

import signal
from collections.abc import Sequence


def name_list(names: Sequence[str], most: int = 8) -> str:
    """The names, or the first `most` of them and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def signal_name(number: int) -> str:
    """SIGKILL, or "signal 40" of one without a name: real-time signals have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
