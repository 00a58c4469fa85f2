"""DOC"""

import contextlib
import io
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.training import tensor_archive

EntryKey = tuple[str, ...]  # the parts of an entry's name: a parameter's own name has dots, too
# Of an entry: a tensor's dtype and shape; None: anything else. Plain tuples, which are quickly sent.
Description = tuple[torch.dtype, tuple[int, ...]] | None
Described = dict[EntryKey, Description]
_NAME = "{version}-worker-{worker}_0.distcp"
# So large that the file is seldom written to: each time, this thread and the step that is being trained swap the GIL.
_BUFFER_BYTES = 1 << 20


class Written(NamedTuple):
    """A file in the checkpoint's folder, and where in it each entry is: its first byte, and how many.

    writer: "stages/1 on HOST".
    """

    writer: str
    file: str
    places: dict[EntryKey, tuple[int, int]]


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

    def __init__(self, entries: Mapping[EntryKey, Any], *, copy: bool) -> None:
        self._entries: dict[EntryKey, Tensor | bytes] = {}
        for key, value in entries.items():
            if isinstance(value, Tensor):
                check_dense(key, value)
                self._entries[key] = value.detach().clone() if copy else value
            else:
                self.add(key, value)

    def add(self, key: EntryKey, value: Any) -> None:
        """One more, which is no tensor: it is pickled at once."""
        self._entries[key] = dumped(key, value)

    def describe(self) -> Described:
        """All of them."""
        return {
            key: None if isinstance(value, bytes) else (value.dtype, tuple(value.shape))
            for key, value in self._entries.items()
        }

    def write(self, folder: str, version: str, worker: int, writer: str, left_out: Collection[EntryKey]) -> Written:
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


def _write(path: Path, entries: Mapping[EntryKey, Tensor | bytes]) -> dict[EntryKey, tuple[int, int]]:
    places = {}
    with path.open("wb", buffering=_BUFFER_BYTES) as file:
        for key, value in entries.items():
            begin = file.tell()
            if isinstance(value, bytes):
                file.write(value)
            else:
                tensor_archive.save(value, file)
            places[key] = begin, file.tell() - begin
        file.flush()
        os.fsync(file.fileno())
    return places


def check_dense(key: EntryKey, value: Any) -> None:
    """
    Raises:
        PipelineError: it is a tensor for which torch Distributed Checkpoint, and a channel, has no place.
    """
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise PipelineError(
            f"{'.'.join(key)} is a tensor of layout {value.layout}, but a checkpoint or mirror holds dense ones only: "
            "keep it dense, or register the buffer with persistent=False"
        )


_OF_PYTHON = (type(None), bool, int, float, complex, str, bytes)
_LEAVES = frozenset((*_OF_PYTHON, torch.Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device))
_MAPPINGS = frozenset((dict, OrderedDict, Counter))
_SEQUENCES = frozenset((list, tuple, set))
_NUMPY: tuple[Any, ...] = (
    np.float64().__reduce__()[0],  # how numpy pickles its numbers
    np.empty(0).__reduce__()[0],  # and arrays
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?SU"},
)
_reading = threading.Lock()  # what is safe is safe in the whole process, where stages may be threads


def dumped(key: EntryKey, value: Any) -> bytes:
    """What torch.save writes of an entry.

    Raises:
        PipelineError: it could not be read back; says what it is.
    """
    foreign = _first_foreign(value, "", set())
    if foreign is None:
        return _saved(value)
    try:
        saved = _saved(value)
        loaded(io.BytesIO(saved))
    except Exception as error:  # objects may raise anything
        where, what = foreign
        raise PipelineError(
            f"{'.'.join(key)}{where} is a {type(what).__name__}, which cannot be read back from a checkpoint: keep "
            "numbers, strings, tensors, and lists and dicts of these, or let state_dict() and load_state_dict() make "
            "them of it"
        ) from error
    return saved


def loaded(file: BinaryIO) -> Any:
    """Undo `dumped`.

    Raises:
        Exception: it holds something else than data, or is damaged.
    """
    with _reading:
        known = set(torch.serialization.get_safe_globals())
        with torch.serialization.safe_globals([one for one in _NUMPY if one not in known]):
            return torch.load(file, weights_only=True, map_location="cpu")


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _first_foreign(value: Any, where: str, seen: set[int]) -> tuple[str, Any] | None:
    """What is none of the types that are known to be read back, and where it is in the entry."""
    kind = type(value)
    if kind in _LEAVES or id(value) in seen:
        return None
    if kind not in _MAPPINGS and kind not in _SEQUENCES:
        return where, value
    seen.add(id(value))
    pairs = [*value.items(), *zip(value, value, strict=True)] if kind in _MAPPINGS else enumerate(value)
    found = (_first_foreign(part, f"{where}[{key!r}]", seen) for key, part in pairs if type(part) not in _LEAVES)
    return next((one for one in found if one is not None), None)
