"""What may be a part of a checkpoint."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeGuard


class Stateful(Protocol):
    """A part: an object of the node itself, or a client of a CourierNode with these methods."""

    def state_dict(self) -> Any:
        """Anything picklable."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from there."""


class SavesItself(Protocol):
    """A part that writes a folder of its own, as pipelines do."""

    def save_async(self, path: Path) -> "Future[list[str]] | Future[None]":
        """Copy the state in memory, then write it while others go on; done once it is written.

        Whoever says the names of the files has them looked for, before they count as a part of a checkpoint.
        """

    def load(self, path: Path) -> None:
        """Go on from there."""


class Trainable(Protocol):
    """A pipeline, as far as `Checkpoints.steps` is concerned."""

    def current_step(self) -> int:
        """How many steps are done."""

    def steps(self, n: int) -> Iterator[Any]:
        """So many more."""

    def skip_step(self, why: str) -> Any:
        """The next one's result, without its batch and its update."""

    def recover(self) -> None:
        """Wait until all its nodes are up, and join them."""


class MirrorsItself(Protocol):
    """A part that can keep its last states in the memory of several processes, as pipelines do."""

    def mirror(self) -> int:
        """Copy the state in memory; returns which one it is."""

    def mirrored_steps(self) -> list[int]:
        """Those that could be gone back to."""

    def go_back(self, step: int) -> None:
        """Go on from one of them."""


def saves_itself(part: Any) -> TypeGuard[SavesItself]:
    """Asked of the class: a client has any method that it is asked for."""
    return callable(getattr(type(part), "save_async", None))


def mirrors_itself(part: Any) -> TypeGuard[MirrorsItself]:
    """As `saves_itself`."""
    return callable(getattr(type(part), "mirror", None))
