"""A pipeline's checkpoint folder, read without a pipeline."""

from pathlib import Path

from lp_pipe.pipeline.saving import safetensors_file
from lp_pipe.pipeline.saving.dcp_reading import SavedFolder
from lp_pipe.pipeline.saving.share_file import is_share


def is_saved_model(folder: Path) -> bool:
    """Whether a pipeline has written it."""
    return folder.is_dir() and any(is_share(path) for path in folder.iterdir())


def export(folder: Path, target: Path) -> int:
    """Write the whole model as one .safetensors file; returns the number of tensors.

    Raises:
        CheckpointError: the folder is incomplete or damaged.
        PipelineError: the file cannot be written.
    """
    found = SavedFolder(folder)
    weights = found.read(("model", name) for name in found.names)
    safetensors_file.write(target, {name: value for (_, name), value in weights.items()}, found.manifest().step)
    return len(weights)
