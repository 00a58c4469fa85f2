"""Writes a torch Distributed Checkpoint by calls, where torch's own `save` needs a process group.

    conductor                 workers
        | ---- plan --------->  what this worker has
      each entry once
        | ---- write -------->  a file of its own, flushed to the disk
      `.metadata`, last of all: which entry lies where

Planner, files and metadata are torch's; it takes 0.7 s to import them, so import this module where it is used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.saved import Key

_PREFIX = "{version}-worker-{worker}_"  # torch appends "0.distcp"


def is_share(path: Path) -> bool:
    """Whether a worker wrote it."""
    return path.match(_PREFIX.format(version="step-*", worker="*") + "*.distcp")


class Share:
    """What one worker writes. The entries must not change until they are written.

    Raises:
        PipelineError: torch Distributed Checkpoint has no place for one of them.
    """

    def __init__(self, entries: Mapping[Key, Any]) -> None:
        for key, value in entries.items():
            _check_dense(key, value)
        self._keys = {".".join(key): key for key in entries}
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner({".".join(key): value for key, value in entries.items()})

    def plan(self) -> SavePlan:
        """All of them; by planner_data plain torch makes nested dicts of the flat names."""
        return replace(self._planner.create_local_plan(), planner_data=self._keys)

    def write(self, folder: str, version: str, worker: int, plan: SavePlan) -> list[WriteResult]:
        """Write what the plan has left to this worker, under names that no checkpoint in the folder has yet."""
        if not plan.items:
            return []  # torch would leave an empty file
        prefix = _StoragePrefix(_PREFIX.format(version=version, worker=worker))
        final = self._planner.finish_plan(replace(plan, storage_data=prefix))
        written: list[WriteResult] = _writer(folder).write_data(final, self._planner).wait()
        return written


class WholePlan:
    """What all workers together write. tied: groups of entries that are one and the same tensor."""

    def __init__(self, plans: Sequence[SavePlan], tied: Sequence[Sequence[str]]) -> None:
        present = {item.index.fqn for plan in plans for item in plan.items}
        groups = [[name for name in names if name in present] for names in tied]
        self._first = {name: names[0] for names in groups for name in names[1:] if name != names[0]}
        # Of several workers that have an entry the lowest writes it: so the file depends on nothing but the cut.
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        self.plans: list[SavePlan]
        self._metadata: Metadata
        self.plans, self._metadata = planner.create_global_plan([self._without_others(plan) for plan in plans])

    def finish(self, folder: Path, results: Sequence[list[WriteResult]]) -> None:
        """Make the folder a checkpoint, at once; then delete what the one before has left there."""
        found = {result.index.fqn: result for written in results for result in written}
        others = [_renamed(found[first], name) for name, first in self._first.items()]
        described = self._metadata.state_dict_metadata
        described.update({name: described[first] for name, first in self._first.items()})
        _writer(folder).finish(self._metadata, [*results, others])
        files = {result.storage_data.relative_path for result in found.values()}
        for path in folder.iterdir():
            if is_share(path) and path.name not in files:
                path.unlink()

    def _without_others(self, plan: SavePlan) -> SavePlan:
        return replace(plan, items=[item for item in plan.items if item.index.fqn not in self._first])


def _check_dense(key: Key, value: Any) -> None:
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise PipelineError(
            f"{'.'.join(key)} is a tensor of layout {value.layout}, but a checkpoint holds dense ones only: keep it "
            "dense, or register the buffer with persistent=False"
        )


def _renamed(result: WriteResult, name: str) -> WriteResult:
    """The same bytes of the same file under another name."""
    return replace(result, index=MetadataIndex(name, result.index.offset, result.index.index))


class _Files(FileSystem):
    def rm_file(self, path: Any) -> None:
        """Torch removes an older .metadata, then renames the new one: killed between, there would be none."""


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta | None:
        """Torch's has the folder's path, and a folder may be moved."""
        return None


def _writer(folder: str | Path) -> _Writer:
    # copy_ahead: torch waits for the current device's stream only, and a stage may be on another one.
    writer = _Writer(folder, sync_files=True, per_thread_copy_ahead=0)
    writer.fs = _Files()
    return writer
