"""Names as messages show them: a list that stays one line, and signals by name."""

import signal
from collections.abc import Sequence


def name_list(names: Sequence[str], most: int = 8) -> str:
    """Return the names, separated by commas; of more than `most` the first ones and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def signal_name(number: int) -> str:
    """Return a signal's name, such as SIGKILL; "signal 40" for real-time signals, which have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
