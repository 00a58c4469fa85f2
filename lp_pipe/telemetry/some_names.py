"""A list of names in a message, which stays one line however many there are."""

from collections.abc import Sequence


def some(names: Sequence[str], most: int = 8) -> str:
    """The names, or the first `most` of them and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
