"""An attacker's frames: a call whose argument leaves a mark where it is unpickled."""

import pickle
from collections.abc import Callable
from pathlib import Path

from lp_pipe.connections import Frame, frames


class Target:
    def add(self, item: object) -> None:
        pass


class Mark:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


def call_frame(mark: Mark) -> bytes:
    """Return a client's frame that calls `add` with an argument that leaves a mark."""
    return b"".join(frames.encode(Frame(frames.CALL, 1, "add", pickle.dumps(((mark,), {})))))
