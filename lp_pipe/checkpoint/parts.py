"""The interfaces of objects that can be parts of a checkpoint."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeGuard


class Stateful(Protocol):
    """A part with a state: an object in this node, or a client of a CourierNode with these methods."""

    def state_dict(self) -> Any:
        """Return the state; anything that can be pickled."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from `state`."""


class SavesItself(Protocol):
    """A part that writes a folder of its own, as pipelines do.

    If it is the state of one node, its attribute `courier_client` is that node's client.
    """

    def save_async(self, path: Path) -> "Future[dict[str, str]] | Future[list[str]] | Future[None]":
        """Copy the state in memory and return a future of its write, which ends once the state is written.

        If the future's result is a list of file names, the checkpoint checks that these files exist. If it is a dict of
        their sha256 by name, the checkpoint does not read them for their checksums either. `PartFiles` writes files so
        that those which have not changed since the checkpoint before cost no write.
        """

    def load(self, path: Path) -> None:
        """Continue from the state in `path`."""


class Recoverable(Protocol):
    """An object that can go back to a checkpoint after the death of a node, as a pipeline can."""

    def current_step(self) -> int:
        """Return how many steps are done."""

    def recover(self) -> None:
        """Wait until all of its nodes are up, and connect to them."""


class Trainable(Recoverable, Protocol):
    """The methods of a pipeline that `Checkpoints.steps` needs."""

    def steps(self, n: int) -> Iterator[Any]:
        """Yield the results of the next n steps."""

    def skip_step(self, why: str) -> Any:
        """Return a result for the next step, without computing its batch or its update."""


class MirrorsItself(Protocol):
    """A part that can keep its last states in the memory of several processes, as pipelines do."""

    def mirror(self) -> int:
        """Copy the state in memory and return its step."""

    def mirrored_steps(self) -> list[int]:
        """Return the steps of the states that can be restored."""

    def go_back(self, step: int) -> None:
        """Restore the state of one of these steps."""


def saves_itself(part: Any) -> TypeGuard[SavesItself]:
    """Return whether the part is SavesItself. Looks at its class, because a client has every attribute."""
    return callable(getattr(type(part), "save_async", None))


def mirrors_itself(part: Any) -> TypeGuard[MirrorsItself]:
    """Return whether the part is MirrorsItself; see `saves_itself`."""
    return callable(getattr(type(part), "mirror", None))
