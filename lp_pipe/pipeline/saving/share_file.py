"""What one worker writes of a checkpoint: entries one after the other, each as torch.save writes it."""

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.saving import quick_save
from lp_pipe.pipeline.saving.plain_values import dumped
from lp_pipe.pipeline.saving.saved import Key

# Of an entry: a tensor's dtype and shape; None: anything else. Plain tuples, which are quickly sent.
Description = tuple[torch.dtype, tuple[int, ...]] | None
Described = dict[Key, Description]

_NAME = "{version}-worker-{worker}_0.distcp"
# So large that the file is seldom written to: each time, this thread and the step that is being trained swap the GIL.
_BUFFER_BYTES = 1 << 20


class Written(NamedTuple):
    """A file in the checkpoint's folder, and where in it each entry is: its first byte, and how many.

    writer: "stages/1 on HOST".
    """

    writer: str
    file: str
    places: dict[Key, tuple[int, int]]


def is_share(path: Path) -> bool:
    """Whether a worker wrote it."""
    return path.match(_NAME.format(version="step-*", worker="*"))


def remove_shares(folder: Path, version: str) -> None:
    """What workers have written of a checkpoint that has failed: a full disk has its room back."""
    for path in folder.glob(_NAME.format(version=version, worker="*")):
        with contextlib.suppress(OSError):
            path.unlink()


class Share:
    """Some entries. copy: else the tensors must not change until they are written.

    Raises:
        PipelineError: torch Distributed Checkpoint has no place for one of them, or it could not be read back.
    """

    def __init__(self, entries: Mapping[Key, Any], *, copy: bool) -> None:
        self._entries: dict[Key, Tensor | bytes] = {}
        for key, value in entries.items():
            if isinstance(value, Tensor):
                check_dense(key, value)
                self._entries[key] = value.detach().clone() if copy else value
            else:
                self.add(key, value)

    def add(self, key: Key, value: Any) -> None:
        """One more, which is no tensor: it is pickled at once."""
        self._entries[key] = dumped(key, value)

    def describe(self) -> Described:
        """All of them."""
        return {
            key: None if isinstance(value, bytes) else (value.dtype, tuple(value.shape))
            for key, value in self._entries.items()
        }

    def write(self, folder: str, version: str, worker: int, writer: str, left_out: Collection[Key]) -> Written:
        """Write all but those, under a name that no checkpoint in the folder has yet, down to the disk."""
        written = Written(writer, _NAME.format(version=version, worker=worker), {})
        kept = {key: value for key, value in self._entries.items() if key not in left_out}
        if not kept:
            return written
        path = Path(folder, written.file)
        try:
            written.places.update(_write(path, kept))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        return written


def _write(path: Path, entries: Mapping[Key, Tensor | bytes]) -> dict[Key, tuple[int, int]]:
    places = {}
    with path.open("wb", buffering=_BUFFER_BYTES) as file:
        for key, value in entries.items():
            begin = file.tell()
            if isinstance(value, bytes):
                file.write(value)
            else:
                quick_save.save(value, file)
            places[key] = begin, file.tell() - begin
        file.flush()
        os.fsync(file.fileno())
    return places


def check_dense(key: Key, value: Any) -> None:
    """
    Raises:
        PipelineError: it is a tensor for which torch Distributed Checkpoint, and a channel, has no place.
    """
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise PipelineError(
            f"{'.'.join(key)} is a tensor of layout {value.layout}, but a checkpoint or mirror holds dense ones only: "
            "keep it dense, or register the buffer with persistent=False"
        )
