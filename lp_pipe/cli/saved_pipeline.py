"""A folder that `pipeline.save` has written, as the checkpoint commands see it."""

from pathlib import Path

from lp_pipe.checkpoint import Checkpoint
from lp_pipe.pipeline.saving import METADATA


class SavedPipeline(Checkpoint):
    """Has no checksum of a file as a whole: each entry has one of its own."""

    def damage(self) -> list[str]:
        from lp_pipe.pipeline.saving.dcp_reading import SavedFolder  # needs torch

        return SavedFolder(self.path).damage()


def is_saved_pipeline(path: Path) -> bool:
    return (path / METADATA).is_file()


def open_saved_pipeline(path: Path) -> SavedPipeline:
    """Read what it says of itself.

    Raises:
        CheckpointError: it is damaged, or not lp_pipe's.
    """
    from lp_pipe.pipeline.saving.dcp_reading import SavedFolder  # needs torch

    step = SavedFolder(path).manifest().step
    files = {file.name: (file.stat().st_size, "") for file in sorted(path.iterdir()) if file.is_file()}
    return SavedPipeline(path, step, (path / METADATA).stat().st_mtime, ("pipeline",), files)
