"""A stage worker's shares of checkpoints, from the moment that is saved until they are on the disk."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from lp_pipe.channels.packing import copied
from lp_pipe.errors import Unavailable
from lp_pipe.pipeline.manifest import ENTRY, Manifest
from lp_pipe.pipeline.saved import entries

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

    from lp_pipe.pipeline.dcp_writing import Share

T = TypeVar("T")


class Shares:
    """Of one worker. Its public methods are also the worker's, for the conductor.

    share: what a checkpoint would hold now, not copied.
    """

    def __init__(self, worker: int, share: Callable[[], dict[str, Any]]) -> None:
        self._worker = worker
        self._share = share
        self._held: dict[str, dict[str, Any]] = {}  # by the checkpoint's version
        self._planned: dict[str, Share] = {}

    def hold_share(self, version: str, copy: bool) -> None:
        """Take this worker's share of a checkpoint. copy: in memory, so that the next steps may go on."""
        self._held[version] = copied(self._share()) if copy else self._share()

    def plan_share(self, version: str, manifest: Manifest) -> "SavePlan":
        """What this worker could write of it.

        Raises:
            Unavailable: this process does not hold it.
        """
        from lp_pipe.pipeline.dcp_writing import Share

        held = _taken(self._held, version)
        found = {ENTRY: manifest.as_entry(), **entries(held, self._worker)}
        share = self._planned[version] = Share(found)
        return share.plan()

    def write_share(self, folder: str, version: str, plan: "SavePlan") -> "list[WriteResult]":
        """Write what the plan has left to this worker; says where each entry is.

        Raises:
            Unavailable: this process does not hold it.
        """
        return _taken(self._planned, version).write(folder, version, self._worker, plan)

    def forget_share(self, version: str) -> None:
        """The checkpoint has failed."""
        self._held.pop(version, None)
        self._planned.pop(version, None)


def _taken(held: dict[str, T], version: str) -> T:
    if version not in held:  # not a mistake: whoever asks is to treat it as the death that it was
        raise Unavailable(f"this worker was started again after its share of {version} had been taken")
    return held.pop(version)
