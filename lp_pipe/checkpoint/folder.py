"""A checkpoint on disk: whole and checked, or none.

    checkpoints/
      step-00000100/          appears by a rename, once all of it is on the disk
        manifest.json         names, sizes and sha256 of all files, and its own sha256
        pipeline/…            a pipeline's own folder
        trainer.state         pickle of what `state_dict()` gave
      .step-00000200.4711     being written; what a killed process leaves is removed by the next one that saves
      .step-00000100.before   one whose place another one of its step takes; put back if that was not to be

Pickles are read back from it: load only what you trust as you trust code.
"""

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import pickle
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lp_pipe.errors import CheckpointError
from lp_pipe.telemetry.file_names import distinct_names, hashed_name

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_FORMAT = 1
_PREFIX = "step-"
_NAME = re.compile(rf"{_PREFIX}\d{{8,}}")
_BEFORE = ".before"
_STATE = ".state"


@dataclass(frozen=True)
class Checkpoint:
    """path: its folder. parts: what was saved, by name. files: by path inside the folder, (bytes, sha256).

    metrics: numbers that were measured when it was saved.
    """

    path: Path
    step: int
    saved: float
    parts: tuple[str, ...]
    files: Mapping[str, tuple[int, str]]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())

    def damage(self) -> list[str]:
        """What is wrong, one line for each file that is missing, cut short, changed, or not of this checkpoint."""
        found = []
        for name, (size, digest) in self.files.items():
            file = self.path / name
            if not file.is_file():
                found.append(f"{name}: is missing")
            elif file.stat().st_size != size:
                found.append(f"{name}: has {file.stat().st_size} bytes instead of {size}")
            else:
                found += [f"{name}: {what}" for what in _changes(file, digest)]
        known = {*self.files, MANIFEST}
        strange = [name for name in _files_of(self.path) if name not in known and not _is_of_the_system(name)]
        return found + [f"{name}: is no file of this checkpoint" for name in strange]


def open_checkpoint(path: Path) -> Checkpoint:
    """Read its manifest; the other files are not looked at.

    Raises:
        CheckpointError: there is none, so that it was never finished; or it is damaged.
    """
    manifest = path / MANIFEST
    try:
        text = manifest.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint: without {MANIFEST} it was never finished") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{manifest} is damaged: {error}") from error
    head, _, digest = text.rstrip("\n").rpartition("\n")
    if hashlib.sha256(head.encode()).hexdigest() != digest:
        raise CheckpointError(f"{manifest} is damaged: its last line is not the sha256 of the others")
    data = json.loads(head)
    if data["format"] != _FORMAT:
        raise CheckpointError(f"{manifest} has format {data['format']}; this version of lp_pipe reads {_FORMAT}")
    files = {name: (size, sha256) for name, (size, sha256) in data["files"].items()}
    return Checkpoint(path, data["step"], data["saved"], tuple(data["parts"]), files, data.get("metrics", {}))


def put_back(folder: Path) -> None:
    """What a process was replacing when it was killed. Not while another process saves here."""
    for before in folder.glob(f".{_PREFIX}*{_BEFORE}"):
        path = folder / before.name.removeprefix(".").removesuffix(_BEFORE)
        if not path.exists():
            before.rename(path)


def prune(folder: Path, step: int, keep: int, best: Collection[Path] = ()) -> None:
    """Delete all but the newest `keep` and the `best` of those up to this step, the one that was just written.

    One that cannot be deleted (somebody has made it read-only, or on a network file system reads it) is a warning.
    Later ones are not of this training: they are damaged, or it has gone back behind them.
    """
    last = _age(folder / f"{_PREFIX}{step:08}")
    for path in [path for path in checkpoints_in(folder) if _age(path) <= last][:-keep]:
        if path in best:
            continue
        try:
            remove(path)
        except OSError as error:
            _log.warning("checkpoint %s is too old to be kept, and cannot be deleted: %s", path, error)


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders of finished checkpoints, oldest step first; one with another name is somebody's own (`step-best`)."""
    return sorted(
        (path for path in folder.glob(f"{_PREFIX}*") if _NAME.fullmatch(path.name) and path.is_dir()), key=_age
    )


def newest_step(folder: Path) -> int:
    """Of the checkpoints in it; -1 when there is none, or its manifest is damaged."""
    with contextlib.suppress(CheckpointError):
        for path in checkpoints_in(folder)[-1:]:
            return open_checkpoint(path).step
    return -1


def begin(folder: Path, step: int) -> Path:
    """A new folder to write into, out of sight.

    Raises:
        OSError: the disk is full, the folder is read-only, ….
    """
    folder.mkdir(parents=True, exist_ok=True)
    put_back(folder)
    for left in folder.glob(f".{_PREFIX}*"):  # by a process that was killed; only one saves here at a time
        shutil.rmtree(left, ignore_errors=True)
    aside = folder / f".{_PREFIX}{step:08}.{os.getpid()}"
    aside.mkdir()
    return aside


def finish(
    aside: Path, step: int, written: Mapping[str, Collection[str]], metrics: Mapping[str, float] | None = None
) -> Checkpoint:
    """Flush everything to the disk, write the manifest, and let it appear; one of the same step is replaced.

    written: by name of a part, files and folders that must be among what is there.

    Raises:
        OSError: as `begin`; or another program has deleted what was written.
    """
    files = {name: (os.path.getsize(aside / name), _sha256(aside / name)) for name in _files_of(aside)}
    gone = [aside / name for names in written.values() for name in names if name not in files]
    _check_are_folders(gone)  # what is deleted later is missed by who reads the manifest
    parts = tuple(written)
    data = {"format": _FORMAT, "step": step, "saved": time.time(), "parts": parts, "metrics": metrics or {}}
    head = json.dumps({**data, "files": files}, indent=1)
    (aside / MANIFEST).write_text(f"{head}\n{hashlib.sha256(head.encode()).hexdigest()}\n", encoding="utf-8")
    for name in (*files, MANIFEST):
        sync(aside / name)
    for folder in (aside, *(path for path in aside.rglob("*") if path.is_dir())):
        sync(folder)
    path = aside.parent / f"{_PREFIX}{step:08}"
    before = path.with_name(f".{path.name}{_BEFORE}")
    if path.exists():
        path.rename(before)
    aside.rename(path)
    sync(path.parent)
    shutil.rmtree(before, ignore_errors=True)
    return open_checkpoint(path)


def remove(path: Path) -> None:
    """Out of sight at once, then gone: half of a checkpoint is never taken for one."""
    hidden = path.with_name(f".{path.name}.old")
    path.rename(hidden)
    if hidden.is_symlink():  # to where somebody has moved it
        hidden.unlink()
    else:
        shutil.rmtree(hidden)


def part_names(parts: Collection[str]) -> dict[str, str]:
    """Return by part the name of its folder, or that of its state's file without the ending; parts may have any name.

    Where the part's own name will not do, it is shortened with a hash: the manifest has the part's name.
    """
    return {
        part: hashed_name(part) if name == MANIFEST or name.endswith(_STATE) else name
        for part, name in distinct_names(parts).items()
    }


def state_file(name: str) -> str:
    """Return the file of a part that gives its state; `name` as in `part_names`."""
    return f"{name}{_STATE}"


def write_state(folder: Path, name: str, state: Any) -> None:
    """A part's state, as it is now."""
    (folder / state_file(name)).write_bytes(pickle.dumps(state, protocol=5))


def read_state(folder: Path, name: str) -> Any:
    """What `write_state` wrote."""
    return pickle.loads((folder / state_file(name)).read_bytes())


def _age(path: Path) -> tuple[int, str]:
    """What orders checkpoints by their steps, which may have more digits than names are filled up to."""
    return len(path.name), path.name


def _files_of(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            yield path.relative_to(folder).as_posix()


def deleted(path: Path) -> FileNotFoundError:
    """The error of what was written, and is not there any more."""
    why = "it was deleted again (does another program save or delete in this folder?)"
    return FileNotFoundError(errno.ENOENT, why, str(path))


def _check_are_folders(paths: Iterable[Path]) -> None:
    """Files that were written, and are not there, have been deleted."""
    for path in paths:
        if not path.is_dir():
            raise deleted(path)


def _is_of_the_system(name: str) -> bool:
    """Such as .DS_Store, or the .nfs000… of a file that somebody deleted and another still reads."""
    return name.rpartition("/")[2].startswith(".")


def _changes(file: Path, digest: str) -> list[str]:
    try:
        return [] if _sha256(file) == digest else ["its contents have changed (sha256 differs)"]
    except OSError as error:  # a broken disk says so itself
        return [f"cannot be read: {error}"]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file's contents to the disk, or which names a folder has."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Ranking:
    """The order of checkpoints by their metric `monitor`; `Checkpoints` explains the arguments."""

    def __init__(self, keep_best: int, monitor: str | None, mode: str) -> None:
        """
        Raises:
            ValueError: says which argument is wrong.
        """
        if keep_best < 0:
            raise ValueError(f"keep_best={keep_best}: give a number of checkpoints, at least 0")
        if keep_best and monitor is None:
            raise ValueError(f"keep_best={keep_best} needs monitor=…, the name of the metric that decides")
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r} must be 'min' or 'max'")
        self._keep_best = keep_best
        self._monitor = monitor
        self._sign = 1 if mode == "min" else -1

    def check(self, metrics: Mapping[str, float]) -> None:
        """Refuse a checkpoint's metrics that lack the monitored one, which may be misspelt.

        Raises:
            ValueError: says which there are.
        """
        if metrics and self._monitor is not None and self._monitor not in metrics:
            raise ValueError(f"monitor={self._monitor!r} is not among the metrics {', '.join(metrics)}")

    def best_first(self, folder: Path) -> list[Checkpoint]:
        """Return the checkpoints that have the metric, the best first; of equal ones the oldest.

        Raises:
            ValueError: there is no metric to look at.
        """
        if self._monitor is None:
            raise ValueError("best() needs Checkpoints(..., monitor=…), the name of the metric that decides")
        name, found = self._monitor, []
        for path in checkpoints_in(folder):
            with contextlib.suppress(CheckpointError):
                checkpoint = open_checkpoint(path)
                if not math.isnan(checkpoint.metrics.get(name, math.nan)):
                    found.append(checkpoint)
        return sorted(found, key=lambda one: (self._sign * one.metrics[name], one.step))

    def kept(self, folder: Path) -> set[Path]:
        """Return the folders of those that are kept for being the best."""
        if not self._keep_best:
            return set()
        return {checkpoint.path for checkpoint in self.best_first(folder)[: self._keep_best]}
