"""The file that one worker writes of a checkpoint: entries one after the other, each as torch.save writes it.

An entry that is no tensor is written only if it can be read back without running code. torch.load(weights_only=True)
reads Python's own types and tensors. numpy's numbers are read too, because learning rates are such numbers when a
schedule computes with numpy (`LambdaLR(optimizer, lambda step: numpy.cos(step))`).
"""

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
from lp_pipe.training.tensor_parts import Box, TensorPart, as_part

EntryKey = tuple[str, ...]  # the parts of an entry's name: a parameter's own name has dots, too
# A tensor's dtype and shape, and the boxes of a part (None: it is whole); None for any other entry. Plain tuples, which
# are quick to send.
Description = tuple[torch.dtype, tuple[int, ...], tuple[Box, ...] | None] | None
Described = dict[EntryKey, Description]
_NAME = "{version}-worker-{worker}_0.distcp"
# So large that the file is seldom written to: each write swaps the GIL with the step that is being trained.
_BUFFER_BYTES = 1 << 20


class Written(NamedTuple):
    """A file in the checkpoint's folder, and the places of each entry in it: first byte and length.

    writer: the node and its host, "stages/1 on HOST". places: one for each box of a part, one for any other entry.
    """

    writer: str
    file: str
    places: dict[EntryKey, list[tuple[int, int]]]


def is_share(path: Path) -> bool:
    """Return whether a stage worker wrote the file."""
    return path.match(_NAME.format(version="step-*", worker="*"))


def remove_shares(folder: Path, version: str) -> None:
    """Delete the files that workers have written of a failed checkpoint, so that a full disk has room again."""
    for path in folder.glob(_NAME.format(version=version, worker="*")):
        with contextlib.suppress(OSError):
            path.unlink()


class Share:
    """A set of entries to be written.

    copy: copy the tensors; without it they must not change until they are written.

    Raises:
        PipelineError: torch Distributed Checkpoint cannot hold an entry, or it could not be read back.
    """

    def __init__(self, entries: Mapping[EntryKey, Any], *, copy: bool) -> None:
        self._entries: dict[EntryKey, Tensor | TensorPart | bytes] = {}
        for key, value in entries.items():
            found = as_part(value) if isinstance(value, Tensor) else value
            if isinstance(found, Tensor):
                check_dense(key, found)
                self._entries[key] = found.detach().clone() if copy else found
            elif isinstance(found, TensorPart):
                values = tuple(box.detach().clone() for box in found.values) if copy else found.values
                self._entries[key] = found._replace(values=values)
            else:
                self.add(key, found)

    def add(self, key: EntryKey, value: Any) -> None:
        """Add an entry that is no tensor; it is pickled at once."""
        self._entries[key] = dumped(key, value)

    def describe(self) -> Described:
        """Return the description of every entry."""
        return {key: _described(value) for key, value in self._entries.items()}

    def write(self, folder: str, version: str, worker: int, writer: str, left_out: Collection[EntryKey]) -> Written:
        """Write all entries but `left_out` to the disk, under a name that no checkpoint in the folder has yet."""
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


def _described(value: Tensor | TensorPart | bytes) -> Description:
    if isinstance(value, bytes):
        return None
    return value.dtype, tuple(value.shape), value.boxes if isinstance(value, TensorPart) else None


def _write(
    path: Path, entries: Mapping[EntryKey, Tensor | TensorPart | bytes]
) -> dict[EntryKey, list[tuple[int, int]]]:
    places: dict[EntryKey, list[tuple[int, int]]] = {}
    with path.open("wb", buffering=_BUFFER_BYTES) as file:
        for key, value in entries.items():
            places[key] = []
            for piece in value.values if isinstance(value, TensorPart) else (value,):
                begin = file.tell()
                if isinstance(piece, bytes):
                    file.write(piece)
                else:
                    tensor_archive.save(piece, file)
                places[key].append((begin, file.tell() - begin))
        file.flush()
        os.fsync(file.fileno())
    return places


def check_dense(key: EntryKey, value: Any) -> None:
    """Refuse a tensor that torch Distributed Checkpoint and channels cannot hold.

    Raises:
        PipelineError: the value is a tensor of another layout than strided.
    """
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise PipelineError(
            f"{'.'.join(key)} is a tensor of layout {value.layout}, but a checkpoint or mirror holds dense tensors "
            "only: keep it dense, or register the buffer with persistent=False"
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
_reading = threading.Lock()  # torch's list of safe classes belongs to the process, and stages may be threads


def dumped(key: EntryKey, value: Any) -> bytes:
    """Return what torch.save writes of an entry.

    Raises:
        PipelineError: it could not be read back; the error says which part.
    """
    foreign = _first_foreign(value, "", set())
    if foreign is None:
        return _saved(value)
    try:
        saved = _saved(value)
        loaded(io.BytesIO(saved))
    except Exception as error:  # the user's objects may raise anything
        where, what = foreign
        raise PipelineError(
            f"{'.'.join(key)}{where} is a {type(what).__name__}, which cannot be read back from a checkpoint: keep "
            "numbers, strings, tensors, and lists and dicts of these, or convert it in state_dict() and "
            "load_state_dict()"
        ) from error
    return saved


def loaded(file: BinaryIO) -> Any:
    """Read what `dumped` has returned.

    Raises:
        Exception: the file holds something else than data, or is damaged.
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
    """Return the first part of a type that is not known to be readable, and its place in the entry."""
    kind = type(value)
    if kind in _LEAVES or id(value) in seen:
        return None
    if kind not in _MAPPINGS and kind not in _SEQUENCES:
        return where, value
    seen.add(id(value))
    pairs = [*value.items(), *zip(value, value, strict=True)] if kind in _MAPPINGS else enumerate(value)
    found = (_first_foreign(part, f"{where}[{key!r}]", seen) for key, part in pairs if type(part) not in _LEAVES)
    return next((one for one in found if one is not None), None)
