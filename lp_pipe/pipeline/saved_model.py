"""A pipeline's checkpoint folder, read without a pipeline."""

from pathlib import Path

from lp_pipe.pipeline import manifest, safetensors_file
from lp_pipe.pipeline.training import read_share


def is_saved_model(folder: Path) -> bool:
    """Whether a pipeline has written it."""
    return folder.is_dir() and any(folder.glob(manifest.SHARE.format(version="step-*", worker="*")))


def export(folder: Path, target: Path) -> int:
    """Write the whole model as one .safetensors file; returns the number of tensors.

    Raises:
        CheckpointError: the folder is incomplete or damaged.
        PipelineError: the file cannot be written.
    """
    found = manifest.read(folder)
    weights = {name: value for file in found.files for name, value in read_share(folder / file)["weights"].items()}
    safetensors_file.write(target, {name: weights[name] for name in found.names}, found.step)
    return len(found.names)
