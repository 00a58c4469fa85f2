"""Write a torch Distributed Checkpoint by calls, where torch's own `save` needs a process group.

    conductor                 workers
        | ---- plan --------->  what this worker has
      each entry once
        | ---- write -------->  a file of its own, flushed to the disk
      `.metadata`, last of all: which entry lies where

The format is torch's, and so are the classes of the metadata. Importing them takes 0.7 s, so import this module where
it is used. torch's planner and writer took ten times as long for the entries of a small model.
"""

import contextlib
import functools
import os
import pickle
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lp_pipe.checkpoint.folder import sync
from lp_pipe.errors import CheckpointError
from lp_pipe.pipeline.saving import METADATA
from lp_pipe.private_torch import storage_info
from lp_pipe.training.share_file import Described, Description, EntryKey, Written, is_share
from lp_pipe.training.tensor_parts import Box, check_cover


class WholePlan:
    """The entries that all workers together write.

    Of several workers that have an entry, or a box of a tensor, the first one writes it, so the files depend on the cut
    alone.

    described: what each worker has. tied: groups of entries that are one and the same tensor.
    left_out: for each worker, the entries that it need not write.

    Raises:
        CheckpointError: the parts of a tensor are not the whole of it.
    """

    def __init__(self, described: Sequence[Described], tied: Sequence[Sequence[EntryKey]]) -> None:
        self._shares = described
        self._described: Described = {}
        self.left_out: list[set[EntryKey]] = []
        for share in described:
            self.left_out.append({key for key, what in share.items() if not self._adds(key, what)})
        for key, what in self._described.items():
            if what is not None and what[2] is not None:
                check_cover(".".join(key), what[1], what[2])
        groups = [[key for key in keys if key in self._described] for keys in tied]
        self._first = {key: keys[0] for keys in groups for key in keys[1:] if key != keys[0]}
        for key, first in self._first.items():
            self._described[key] = self._described[first]
        for share, left_out in zip(described, self.left_out, strict=True):
            left_out |= share.keys() & self._first.keys()

    def _adds(self, key: EntryKey, what: Description) -> bool:
        """Take in what a worker has of an entry; return whether it is more than the workers before have."""
        if key not in self._described:
            self._described[key] = what
            return True
        known = self._described[key]
        if known is None or known[2] is None:
            return False
        if what is None or what[:2] != known[:2]:
            raise CheckpointError(
                f"workers have parts of different tensors as {'.'.join(key)}: {known[:2]} and {what and what[:2]}"
            )
        own = what[2] if what[2] is not None else (((0,) * len(what[1]), what[1]),)
        more = tuple(box for box in own if box not in known[2])
        self._described[key] = (*known[:2], known[2] + more)
        return bool(more)

    def finish(self, folder: Path, written: Sequence[Written]) -> None:
        """Make the folder a checkpoint in one step; then delete the shares of the one before.

        written: in the workers' order.
        """
        places: dict[tuple[EntryKey, Box | None], tuple[str, int, int]] = {}
        for share, file in zip(self._shares, written, strict=True):
            for key, found in file.places.items():
                for box, place in zip(_boxes(share[key]), found, strict=True):
                    places.setdefault((key, box), (file.file, *place))
        _replace(folder / METADATA, pickle.dumps(self._metadata(places)))
        with contextlib.suppress(OSError):  # it is a checkpoint even so; the next one tries again
            sync(folder)  # first: otherwise a power cut might undo the renaming, and not the deleting
            _delete_shares(folder, but={share.file for share in written})

    def _metadata(self, places: Mapping[tuple[EntryKey, Box | None], tuple[str, int, int]]) -> Metadata:
        """Return what torch's reader needs; planner_data lets it make nested dicts of the flat names."""
        names = {key: ".".join(key) for key in self._described}
        entries = {names[key]: _entry(what) for key, what in self._described.items()}
        storage = {
            _index(names[key], what, number, box): storage_info(*places[self._first.get(key, key), box])
            for key, what in self._described.items()
            for number, box in enumerate(_boxes(what))
        }
        return Metadata(entries, {name: key for key, name in names.items()}, storage, version=CURRENT_DCP_VERSION)


def _boxes(what: Description) -> Sequence[Box | None]:
    """Return the boxes of a part; for any other entry one None, which stands for all of it."""
    return (None,) if what is None or what[2] is None else what[2]


def _index(name: str, what: Description, number: int, box: Box | None) -> MetadataIndex:
    if what is None:
        return MetadataIndex(name)
    return MetadataIndex(name, _origin(len(what[1])) if box is None else torch.Size(box[0]), number)


@functools.lru_cache(maxsize=1024)  # cached also because pickle writes an object once
def _entry(what: Description) -> TensorStorageMetadata | BytesStorageMetadata:
    if what is None:
        return BytesStorageMetadata()
    dtype, shape, boxes = what[0], torch.Size(what[1]), what[2]
    whole = [ChunkStorageMetadata(_origin(len(shape)), shape)]
    parts = [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in boxes or ()]
    return TensorStorageMetadata(TensorProperties(dtype), shape, whole if boxes is None else parts)


@functools.cache
def _origin(dimensions: int) -> torch.Size:
    return torch.Size([0] * dimensions)


def _delete_shares(folder: Path, but: Collection[str]) -> None:
    for path in folder.iterdir():
        if is_share(path) and path.name not in but:
            with contextlib.suppress(OSError):
                path.unlink()


def _replace(path: Path, data: bytes) -> None:
    """Replace the file in one step, when the data is on the disk: a process that is killed leaves the old one."""
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
