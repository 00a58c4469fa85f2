"""A stage worker's shares of checkpoints, from the moment that is saved until they are on the disk."""

from collections.abc import Callable, Collection
from pathlib import Path

from lp_pipe.checkpoint.host_visibility import check_is_here
from lp_pipe.errors import Unavailable
from lp_pipe.pipeline.saving.contents import ENTRY, Manifest, Saved, entries
from lp_pipe.training.share_file import Described, EntryKey, Share, Written, remove_shares


class Shares:
    """Of one worker. Its public methods are also the worker's, for the conductor.

    share: what a checkpoint would hold now, not copied. writer: "stages/1 on HOST".
    """

    def __init__(self, worker: int, share: Callable[[], Saved], writer: str) -> None:
        self._worker = worker
        self._writer = writer
        self._share = share
        self._held: dict[str, Share] = {}  # by the checkpoint's version

    def hold_share(self, version: str, copy: bool) -> None:
        """Take this worker's share of a checkpoint. copy: in memory, so that the next steps may go on."""
        self._held[version] = Share(entries(self._share(), self._worker), copy=copy)

    def plan_share(self, version: str, manifest: Manifest) -> Described:
        """What this worker could write of it.

        Raises:
            Unavailable: this process does not hold it.
        """
        share = self._of(version)
        share.add(ENTRY, manifest.as_entry())
        return share.describe()

    def write_share(self, folder: str, version: str, left_out: Collection[EntryKey]) -> Written:
        """Write all but what is left to others; says where each entry is.

        Raises:
            Unavailable: this process does not hold it.
            CheckpointError: this host does not have the folder, which the conductor has made.
        """
        share = self._of(version)
        del self._held[version]
        check_is_here(Path(folder), "the pipeline's first stage")
        return share.write(folder, version, self._worker, self._writer, left_out)

    def remove_share(self, folder: str, version: str) -> None:
        """The checkpoint has failed when some were written: also where nobody else could, in a folder of this host."""
        remove_shares(Path(folder), version)

    def forget_share(self, version: str) -> None:
        """The checkpoint has failed."""
        self._held.pop(version, None)

    def _of(self, version: str) -> Share:
        if version not in self._held:  # not a mistake: whoever asks is to treat it as the death that it was
            raise Unavailable(
                f"this worker has no share of {version}: it was started again, or nobody wrote it for long"
            )
        return self._held[version]
