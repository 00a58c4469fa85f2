"""What a worker has beside the step that it is at: later forwards, and earlier weights."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Ahead:
    """Of a synchronous schedule there is neither; of an asynchronous one see AsyncWorker."""

    def abort(self, tag: int, reason: str) -> None:
        """Let operations up to `tag` that have not begun fail."""

    def discard(self) -> None:
        """Forget the next step's forwards: they will be done again."""

    def forget_versions(self) -> None:
        """The weights have come from elsewhere."""

    def between_steps(self) -> AbstractContextManager[None]:
        """In the body buffers are as after the last whole step."""
        return nullcontext()

    def versions(self) -> list[dict[str, Any]]:
        """What a checkpoint needs beside the newest weights, to go on as if nothing had happened; if anything, one."""
        return []

    def restore(self, versions: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the `versions` of the workers that wrote a checkpoint."""
