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
from lp_pipe.pipeline.saving import METADATA
from lp_pipe.private_torch import storage_info
from lp_pipe.training.share_file import Described, Description, EntryKey, Written, is_share


class WholePlan:
    """The entries that all workers together write.

    Of several workers that have an entry the first one writes it, so the files depend on the cut alone.

    tied: groups of entries that are one and the same tensor.
    left_out: for each worker, the entries that it need not write.
    """

    def __init__(self, described: Sequence[Described], tied: Sequence[Sequence[EntryKey]]) -> None:
        self._described: Described = {}
        for share in described:
            self._described.update({key: what for key, what in share.items() if key not in self._described})
        groups = [[key for key in keys if key in self._described] for keys in tied]
        self._first = {key: keys[0] for keys in groups for key in keys[1:] if key != keys[0]}
        self.left_out: list[set[EntryKey]] = []
        taken = {*self._first}
        for share in described:
            self.left_out.append(share.keys() & taken)
            taken |= share.keys()

    def finish(self, folder: Path, written: Sequence[Written]) -> None:
        """Make the folder a checkpoint in one step; then delete the shares of the one before."""
        places = {key: (share.file, *place) for share in written for key, place in share.places.items()}
        places.update({key: places[first] for key, first in self._first.items()})
        _replace(folder / METADATA, pickle.dumps(_metadata(self._described, places)))
        with contextlib.suppress(OSError):  # it is a checkpoint even so; the next one tries again
            sync(folder)  # first: otherwise a power cut might undo the renaming, and not the deleting
            _delete_shares(folder, but={share.file for share in written})


def _delete_shares(folder: Path, but: Collection[str]) -> None:
    for path in folder.iterdir():
        if is_share(path) and path.name not in but:
            with contextlib.suppress(OSError):
                path.unlink()


def _metadata(described: Described, places: Mapping[EntryKey, tuple[str, int, int]]) -> Metadata:
    """Return what torch's reader needs; planner_data lets it make nested dicts of the flat names."""
    names = {key: ".".join(key) for key in described}
    entries = {names[key]: _entry(what) for key, what in described.items()}
    storage = {_index(names[key], what): storage_info(*places[key]) for key, what in described.items()}
    return Metadata(entries, {name: key for key, name in names.items()}, storage, version=CURRENT_DCP_VERSION)


def _index(name: str, what: Description) -> MetadataIndex:
    return MetadataIndex(name) if what is None else MetadataIndex(name, _origin(len(what[1])), 0)


@functools.lru_cache(maxsize=1024)  # cached also because pickle writes an object once
def _entry(what: Description) -> TensorStorageMetadata | BytesStorageMetadata:
    if what is None:
        return BytesStorageMetadata()
    dtype, shape = what[0], torch.Size(what[1])
    return TensorStorageMetadata(TensorProperties(dtype), shape, [ChunkStorageMetadata(_origin(len(shape)), shape)])


@functools.cache
def _origin(dimensions: int) -> torch.Size:
    return torch.Size([0] * dimensions)


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
