"""The file that makes a folder a checkpoint: written last, and whole or not at all."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lp_pipe.errors import CheckpointError

SHARE = "{version}-worker-{worker}.pt"
_NAME = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """step: finished optimizer steps. files: the workers' shares. names: parameters and buffers, in order.

    loss_scale: the state of a LossScale, where there is one.
    """

    step: int
    seed: int
    files: tuple[str, ...]
    names: tuple[str, ...]
    loss_scale: tuple[float, int] | None = None


def write(folder: Path, manifest: Manifest) -> None:
    """Write aside, flush to disk, rename."""
    aside = folder / f".{_NAME}.{os.getpid()}"
    with aside.open("w", encoding="utf-8") as file:
        json.dump({"format": _FORMAT, **asdict(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(folder / _NAME)


def remove_older_shares(folder: Path, files: Sequence[str]) -> None:
    """Delete the shares of checkpoints that the manifest does not name any more."""
    for path in folder.glob(SHARE.format(version="step-*", worker="*")):
        if path.name not in files:
            path.unlink()


def read(folder: Path) -> Manifest:
    """Read it.

    Raises:
        CheckpointError: there is none (it was never finished), or another version of lp_pipe wrote it.
    """
    path = folder / _NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: without {_NAME} it was never finished") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if data.get("format") != _FORMAT:
        raise CheckpointError(f"{path} has format {data.get('format')}; this version of lp_pipe reads {_FORMAT}")
    scale = data.get("loss_scale")
    files, names = tuple(data["files"]), tuple(data["names"])
    return Manifest(data["step"], data["seed"], files, names, tuple(scale) if scale else None)
