"""The shares of checkpoints that a stage worker holds, from the saved moment until they are on the disk."""

from collections.abc import Callable
from pathlib import Path

from lp_pipe.checkpoint.host_visibility import check_is_here
from lp_pipe.errors import Unavailable
from lp_pipe.pipeline.protocol import ForgetShare, Handlers, HoldShare, PlanShare, RemoveShare, WriteShare
from lp_pipe.pipeline.saving.contents import ENTRY, Saved, entries
from lp_pipe.training.share_file import Described, Share, Written, remove_shares


class Shares:
    """The shares of checkpoints that one worker holds.

    share: returns what a checkpoint would hold now, not copied. writer: for messages, such as "stages/1 on HOST".
    """

    def __init__(self, worker: int, share: Callable[[], Saved], writer: str) -> None:
        self._worker = worker
        self._writer = writer
        self._share = share
        self._held: dict[str, Share] = {}  # by the checkpoint's version

    def handlers(self) -> Handlers:
        return dict(
            [
                HoldShare.by(self.hold),
                PlanShare.by(self.plan),
                WriteShare.by(self.write),
                RemoveShare.by(self.remove),
                ForgetShare.by(self.forget),
            ]
        )

    def hold(self, command: HoldShare) -> None:
        self._held[command.version] = Share(entries(self._share(), self._worker), copy=command.copy)

    def plan(self, command: PlanShare) -> Described:
        share = self._of(command.version)
        share.add(ENTRY, command.manifest.as_entry())
        return share.describe()

    def write(self, command: WriteShare) -> Written:
        share = self._of(command.version)
        del self._held[command.version]
        check_is_here(Path(command.folder), "the pipeline's first stage")
        return share.write(command.folder, command.version, self._worker, self._writer, command.left_out)

    def remove(self, command: RemoveShare) -> None:
        remove_shares(Path(command.folder), command.version)

    def forget(self, command: ForgetShare) -> None:
        self._held.pop(command.version, None)

    def _of(self, version: str) -> Share:
        if version not in self._held:  # no mistake: the conductor is to treat it as the death that it was
            raise Unavailable(
                f"{self._writer} has no share of {version}: it was started again, or the share was not written for long"
            )
        return self._held[version]
