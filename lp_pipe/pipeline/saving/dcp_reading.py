"""Read parts of a torch Distributed Checkpoint, without unpickling anything but data.

Importing this module takes 0.7 s, so import it where it is used.
"""

import io
import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lp_pipe.errors import CheckpointError
from lp_pipe.pipeline.saving import METADATA, safetensors_file
from lp_pipe.pipeline.saving.contents import ENTRY, Manifest, manifest_from
from lp_pipe.training.share_file import EntryKey, is_share, loaded
from lp_pipe.training.tensor_parts import Box, TensorPart, check_cover


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

    def read(
        self, keys: Iterable[EntryKey], boxes: Mapping[EntryKey, Sequence[Box]] | None = None
    ) -> dict[EntryKey, Any]:
        """Return these entries, from the files that have them; of the tensors in `boxes` a TensorPart with these boxes.

        A part is read from whatever parts were written, and from their files alone.

        Raises:
            CheckpointError: a file is missing or damaged, or the folder has not all of a tensor.
        """
        wanted = {".".join(key): key for key in keys}
        parts = {name: self._empty_part(name, boxes[key]) for name, key in wanted.items() if boxes and key in boxes}
        planner = _EntryPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.parts = parts
        planner.set_up_planner({name: self._empty(name) for name in wanted if name not in parts}, self._metadata)
        reader = FileSystemReader(self._folder)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = planner.create_local_plan()
        for name, part in parts.items():
            plan.items.extend(self._items(name, part))
        for file, items in self._by_file(plan).items():
            try:
                self._compare(items)
                reader.read_data(LoadPlan(items), planner)
            except Exception as error:  # damaged bytes may cause any error in torch
                path = self._folder / file
                raise CheckpointError(f"cannot read {path}, which {METADATA} names: {error}") from error
        return {key: parts.get(name, planner.state_dict.get(name)) for name, key in wanted.items()}

    def boxes_of_states(
        self, own: Mapping[str, tuple[tuple[int, ...], tuple[Box, ...]]], kind: str = "optimizer"
    ) -> dict[EntryKey, tuple[Box, ...]]:
        """Return which boxes to read of the optimizer's state, for a worker that has parts of parameters.

        kind: "model": of the parameters themselves.
        own: by name the parameter's shape and the worker's boxes of it. State of another shape is read as a whole.
        """
        found: dict[EntryKey, tuple[Box, ...]] = {}
        for key in self.keys:
            if key[0] == kind and key[1] in own:
                described, (shape, boxes) = self._metadata.state_dict_metadata[".".join(key)], own[key[1]]
                if isinstance(described, TensorStorageMetadata) and shape and tuple(described.size) == shape:
                    found[key] = boxes
        return found

    def damage(self) -> list[str]:
        """Return a line for each entry that is missing, cut short or changed."""
        return [what for index in self._metadata.storage_data if (what := self._damage_of(index)) is not None]

    def _compare(self, items: Iterable[ReadItem]) -> None:
        """Compare the checksums, which torch writes but does not read."""
        for index in dict.fromkeys(item.storage_index for item in items):
            if (what := self._damage_of(index)) is not None:
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
        self._check_has_all(name, described)
        return torch.empty(described.size, dtype=described.properties.dtype, device="cpu")

    def _check_has_all(self, name: str, described: TensorStorageMetadata) -> None:
        """Refuse a tensor with a part that is described nowhere: torch would leave those elements as they are."""
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in described.chunks]
        check_cover(f"{self._folder}: {name}", tuple(described.size), boxes)

    def _empty_part(self, name: str, boxes: Sequence[Box]) -> TensorPart:
        described = self._metadata.state_dict_metadata[name]
        if not isinstance(described, TensorStorageMetadata):
            raise CheckpointError(f"{self._folder}: {name} is no tensor, so it has no part {list(boxes)}")
        self._check_has_all(name, described)
        dtype = described.properties.dtype
        values = tuple(torch.empty(size, dtype=dtype, device="cpu") for _, size in boxes)
        return TensorPart(tuple(described.size), dtype, tuple(boxes), values)

    def _items(self, name: str, part: TensorPart) -> list[ReadItem]:
        described = self._metadata.state_dict_metadata[name]
        assert isinstance(described, TensorStorageMetadata), "_empty_part has checked it"
        chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in part.boxes]
        return create_read_items_for_chunk_list(name, described, chunks)

    def _by_file(self, plan: LoadPlan) -> dict[str, list[ReadItem]]:
        found: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            found.setdefault(self._metadata.storage_data[item.storage_index].relative_path, []).append(item)
        return found


class _EntryPlanner(DefaultLoadPlanner):
    parts: Mapping[str, TensorPart]

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        if index.fqn not in self.parts:
            return super().lookup_tensor(index)
        assert index.index is not None, "create_read_items_for_chunk_list numbers the boxes"
        return self.parts[index.fqn].values[index.index]

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
