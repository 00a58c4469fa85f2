"""Read parts of a torch Distributed Checkpoint, without unpickling anything but data.

Importing this module takes 0.7 s, so import it where it is used.
"""

import io
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from lp_pipe.errors import CheckpointError
from lp_pipe.pipeline.saving import METADATA, safetensors_file
from lp_pipe.pipeline.saving.contents import ENTRY, Manifest, manifest_from
from lp_pipe.training.share_file import EntryKey, is_share, loaded


class SavedFolder:
    """A checkpoint's folder; the constructor reads its metadata.

    Raises:
        CheckpointError: there is none (it was never finished), it is damaged, or not lp_pipe's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = _metadata(folder)
        names = self._metadata.planner_data or {}
        self.keys: list[EntryKey] = [tuple(names.get(name, (name,))) for name in self._metadata.state_dict_metadata]
        if ENTRY not in self.keys:
            raise CheckpointError(f"{folder} is no checkpoint of lp_pipe: {METADATA} has no entry {ENTRY[0]!r}")

    @property
    def names(self) -> list[str]:
        """The names of the model's parameters and buffers."""
        return [key[1] for key in self.keys if key[0] == "model"]

    def manifest(self) -> Manifest:
        """Return the checkpoint's manifest.

        Raises:
            CheckpointError: as `read`; or another version of lp_pipe wrote it.
        """
        return manifest_from(self.read([ENTRY])[ENTRY], str(self._folder))

    def read(self, keys: Iterable[EntryKey]) -> dict[EntryKey, Any]:
        """Return these entries, from the files that have them.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        wanted = {".".join(key): key for key in keys}
        planner = _EntryPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({name: self._empty(name) for name in wanted}, self._metadata)
        reader = FileSystemReader(self._folder)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        for file, items in self._by_file(planner.create_local_plan()).items():
            try:
                self._compare(items)
                reader.read_data(LoadPlan(items), planner)
            except Exception as error:  # damaged bytes may cause any error in torch
                path = self._folder / file
                raise CheckpointError(f"cannot read {path}, which {METADATA} names: {error}") from error
        return {key: planner.state_dict[name] for name, key in wanted.items()}

    def damage(self) -> list[str]:
        """Return a line for each entry that is missing, cut short or changed."""
        return [what for index in self._metadata.storage_data if (what := self._damage_of(index)) is not None]

    def _compare(self, items: Iterable[ReadItem]) -> None:
        """Compare the checksums, which torch writes but does not read."""
        for item in items:
            if (what := self._damage_of(item.storage_index)) is not None:
                raise CheckpointError(what)

    def _damage_of(self, index: MetadataIndex) -> str | None:
        stored = self._metadata.storage_data[index]
        where = f"{stored.relative_path}: {index.fqn}"
        try:
            with (self._folder / stored.relative_path).open("rb") as file:
                file.seek(stored.offset)
                entry = io.BytesIO(file.read(stored.length))
            with zipfile.ZipFile(entry) as archive:
                is_whole = archive.testzip() is None
        except Exception as error:  # damaged bytes may cause any error in zipfile
            return f"{where}: cannot be read: {error}"
        return None if is_whole else f"{where}: its contents have changed (CRC-32 differs)"

    def _empty(self, name: str) -> torch.Tensor | None:
        described = self._metadata.state_dict_metadata[name]
        if not isinstance(described, TensorStorageMetadata):
            return None
        return torch.empty(described.size, dtype=described.properties.dtype, device="cpu")

    def _by_file(self, plan: LoadPlan) -> dict[str, list[ReadItem]]:
        found: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            found.setdefault(self._metadata.storage_data[item.storage_index].relative_path, []).append(item)
        return found


class _EntryPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an entry as data; torch's own method would unpickle anything."""
        self.state_dict[read_item.dest_index.fqn] = loaded(value)


def _metadata(folder: Path) -> Metadata:
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            found = _DataOnly(file).load()
        if not isinstance(found, Metadata):
            raise TypeError(f"it holds a {type(found).__name__}")
        for stored in found.storage_data.values():
            _check_is_inside(Path(stored.relative_path))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: {_what_it_is(folder)}") from None
    except NotADirectoryError:
        raise CheckpointError(
            f"{folder} is a file, but a checkpoint is a folder: pass what torch.load or safetensors reads from the "
            "file to load_state_dict()"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # damaged bytes may cause any error in pickle
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return found


def _what_it_is(folder: Path) -> str:
    """Return what a folder without .metadata is. A program's checkpoint has a folder for each of its pipelines."""
    if not folder.exists():
        return "there is no such folder"
    inside = sorted(str(file.parent) for file in folder.glob(f"*/{METADATA}"))
    return (
        f"it holds the checkpoint of a pipeline: give {' or '.join(inside)}"
        if inside
        else f"without {METADATA} it was never finished"
    )


def _check_is_inside(file: Path) -> None:
    """Refuse files outside of the folder: a checkpoint from elsewhere could have an endless or private file read."""
    if file.is_absolute() or ".." in file.parts:
        raise ValueError(f"it names {file}, which is not in this folder")


class _Properties(TensorProperties):
    """A tensor's properties, as this torch knows them.

    Those of a later torch (2.15) have more fields, which this one would refuse.
    """

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        known = len(TensorProperties().__getstate__())
        super().__setstate__(state[:known])  # type: ignore[no-untyped-call]


class _DataOnly(pickle.Unpickler):
    """An unpickler that knows the classes which torch writes into .metadata, and nothing that could act."""

    _CLASSES = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),  # in Python 3.13
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("lp_pipe.private_torch", "_Place"),
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    "BytesStorageMetadata",
                    "ChunkStorageMetadata",
                    "Metadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "TensorStorageMetadata",
                    "_MEM_FORMAT_ENCODING",
                )
            ),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (TensorProperties.__module__, TensorProperties.__name__):
            return _Properties
        if (module, name) in self._CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no part of a checkpoint")


def is_saved_model(folder: Path) -> bool:
    """Return whether a pipeline has written the folder."""
    return folder.is_dir() and any(is_share(path) for path in folder.iterdir())


def export(folder: Path, target: Path) -> int:
    """Write the whole model as one .safetensors file; return the number of tensors.

    Raises:
        CheckpointError: the folder is incomplete or damaged.
        PipelineError: the file cannot be written.
    """
    found = SavedFolder(folder)
    weights = found.read(("model", name) for name in found.names)
    safetensors_file.write(target, {name: value for (_, name), value in weights.items()}, found.manifest().step)
    return len(weights)
