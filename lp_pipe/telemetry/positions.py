"""Positions of long-running work in this process, such as the current action of a schedule, for reports of hangs.

A position is asked for only when a report is made.
"""

import threading
import weakref
from typing import Protocol

from lp_pipe.context import NodeContext, context


class Positioned(Protocol):
    def position(self) -> str:
        """Return the position in words; called from another thread than the one that works."""


_known: "weakref.WeakKeyDictionary[Positioned, NodeContext]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def add(one: Positioned) -> None:
    """Register work of the calling node; a weak reference, so it needs no removal."""
    node = context()
    with _lock:
        _known[one] = node


def positions() -> list[tuple[NodeContext, str]]:
    """Return the node and position of all registered work, in the order of `add`."""
    with _lock:
        found = list(_known.items())
    return [(node, f"{node.name}: {one.position()}") for one, node in found]
