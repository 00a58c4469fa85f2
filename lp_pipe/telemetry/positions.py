"""Where long work of this process is: in a schedule, say. Told in reports of hangs, and asked only then."""

import threading
import weakref
from typing import Protocol

from lp_pipe.context import NodeContext, context


class Positioned(Protocol):
    def position(self) -> str:
        """In words; called from another thread than that which works."""


_known: "weakref.WeakKeyDictionary[Positioned, NodeContext]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def add(one: Positioned) -> None:
    """It works for the node that this is called in; forgotten when it is gone."""
    node = context()
    with _lock:
        _known[one] = node


def positions() -> list[tuple[NodeContext, str]]:
    """Of all that are known, in the order in which they were added."""
    with _lock:
        found = list(_known.items())
    return [(node, f"{node.name}: {one.position()}") for one, node in found]
