"""Checkpoints on disk. A checkpoint's folder appears by a rename, once all of it is written and flushed.

    checkpoints/
      step-00000100/          a finished checkpoint
        manifest.json         names, sizes and sha256 of all files, and its own sha256
        pipeline/…            a pipeline's own folder
        trainer.state         pickle of what `state_dict()` returned
      .step-00000200.4711     being written by process 4711; if that was killed, the next save removes it
      .step-00000100.before   being replaced by another checkpoint of its step; restored if that was not finished

Loading unpickles files: load only checkpoints that you trust as you trust code.
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
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
_ASIDE = re.compile(rf"\.({_NAME.pattern})\.\d+")
_BEFORE = ".before"
_MOST_FLUSHES = 16  # at a time
_STATE = ".state"


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint, as its manifest describes it.

    path: its folder. saved: seconds since the epoch. parts: the names of the saved parts.
    files: (bytes, sha256) by path inside the folder. metrics: numbers that were measured when it was saved.
    """

    path: Path
    step: int
    saved: float
    parts: tuple[str, ...]
    files: Mapping[str, tuple[int, str]]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(size for size, _ in self.files.values())

    def damage(self) -> list[str]:
        """Return one line for each file that is missing, truncated, changed, or not part of this checkpoint."""
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
        return found + [f"{name}: is not part of this checkpoint" for name in strange]


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest, and no other file.

    Raises:
        CheckpointError: there is no manifest, so the checkpoint was never finished; or the manifest is damaged.
    """
    manifest = path / MANIFEST
    try:
        text = manifest.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no finished checkpoint: it has no {MANIFEST}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{manifest} is damaged: {error}") from error
    head, _, digest = text.rstrip("\n").rpartition("\n")
    if hashlib.sha256(head.encode()).hexdigest() != digest:
        raise CheckpointError(f"{manifest} is damaged: its last line is not the sha256 of the other lines")
    data = json.loads(head)
    if data["format"] != _FORMAT:
        raise CheckpointError(f"{manifest} has format {data['format']}, but this lp_pipe reads format {_FORMAT}")
    files = {name: (size, sha256) for name, (size, sha256) in data["files"].items()}
    return Checkpoint(path, data["step"], data["saved"], tuple(data["parts"]), files, data.get("metrics", {}))


def restore_replaced(folder: Path) -> None:
    """Restore checkpoints that a killed process was about to replace; not while another process saves here."""
    for before in folder.glob(f".{_PREFIX}*{_BEFORE}"):
        path = folder / before.name.removeprefix(".").removesuffix(_BEFORE)
        if not path.exists():
            before.rename(path)


def prune(folder: Path, step: int, keep: int, best: Collection[Path] = ()) -> None:
    """Delete the checkpoints up to `step`, which was just written, except for the newest `keep` and the `best`.

    A checkpoint that cannot be deleted (read-only, or being read on a network file system) is logged as a warning.
    Checkpoints of later steps stay: they are damaged, or training has gone back to before them.
    """
    last = _age(folder / f"{_PREFIX}{step:08}")
    for path in [path for path in checkpoints_in(folder) if _age(path) <= last][:-keep]:
        if path in best:
            continue
        try:
            remove(path)
        except OSError as error:
            _log.warning("cannot delete the old checkpoint %s: %s", path, error)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the folders of finished checkpoints, oldest step first. Other names, such as `step-best`, are ignored."""
    return sorted(
        (path for path in folder.glob(f"{_PREFIX}*") if _NAME.fullmatch(path.name) and path.is_dir()), key=_age
    )


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint; -1 if there is none, or its manifest is damaged."""
    with contextlib.suppress(CheckpointError):
        for path in checkpoints_in(folder)[-1:]:
            return open_checkpoint(path).step
    return -1


def begin(folder: Path, step: int) -> Path:
    """Create and return a hidden folder to write a checkpoint into.

    Raises:
        OSError: for example, the disk is full or the folder is read-only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    restore_replaced(folder)
    for left in folder.glob(f".{_PREFIX}*"):  # left by a killed process: only one process saves here at a time
        shutil.rmtree(left, ignore_errors=True)
    aside = folder / f".{_PREFIX}{step:08}.{os.getpid()}"
    aside.mkdir()
    return aside


def finished_path(aside: Path) -> Path:
    """Return where a folder that `begin` returned is, once its checkpoint is finished; another folder stays."""
    found = _ASIDE.fullmatch(aside.name)
    return aside.with_name(found[1]) if found else aside


def finish(
    aside: Path,
    step: int,
    written: Mapping[str, Collection[str]],
    metrics: Mapping[str, float] | None = None,
    *,
    digests: Mapping[str, str] | None = None,
    is_flushed: bool = True,
) -> Checkpoint:
    """Flush all files to the disk, write the manifest and rename the folder; replaces a checkpoint of the same step.

    written: by name of a part, the files and folders that must exist. digests: the sha256 of files of which it is known
    already. is_flushed: False leaves the flush to a later `flush`; until then the checkpoint survives the death of
    processes, but not a crash of the machine.

    Raises:
        OSError: as `begin`; or another program has deleted a file that was written.
    """
    known = digests or {}
    files = {
        name: (os.path.getsize(aside / name), known.get(name) or _sha256(aside / name)) for name in _files_of(aside)
    }
    gone = [aside / name for names in written.values() for name in names if name not in files]
    _check_are_folders(gone)  # files that are deleted after this are reported by `damage`
    parts = tuple(written)
    data = {"format": _FORMAT, "step": step, "saved": time.time(), "parts": parts, "metrics": metrics or {}}
    head = json.dumps({**data, "files": files}, indent=1)
    (aside / MANIFEST).write_text(f"{head}\n{hashlib.sha256(head.encode()).hexdigest()}\n", encoding="utf-8")
    if is_flushed:
        # A file that is also in a finished checkpoint of this folder was flushed before that one had its name.
        _sync_all([path for path in (*aside.rglob("*"), aside) if not _is_in_another_checkpoint(path, aside)])
    path = aside.parent / f"{_PREFIX}{step:08}"
    before = path.with_name(f".{path.name}{_BEFORE}")
    if path.exists():
        path.rename(before)
    aside.rename(path)
    if is_flushed:
        sync(path.parent)
    shutil.rmtree(before, ignore_errors=True)
    return open_checkpoint(path)


def flush(folder: Path) -> None:
    """Flush a folder to the disk, with all files and folders in it.

    Raises:
        OSError: for example, something in it was deleted meanwhile.
    """
    _sync_all([*folder.rglob("*"), folder])


def remove(path: Path) -> None:
    """Delete a checkpoint: hide it by a rename first, so that a half-deleted one is never read."""
    hidden = path.with_name(f".{path.name}.old")
    path.rename(hidden)
    if hidden.is_symlink():  # the checkpoint was moved elsewhere
        hidden.unlink()
    else:
        shutil.rmtree(hidden)


def part_names(parts: Collection[str]) -> dict[str, str]:
    """Return, by part, the name of its folder, or of its state file without the ending.

    Parts may have any name. One that is no valid file name is replaced by a hash; the manifest has the part's own name.
    """
    return {
        part: hashed_name(part) if name == MANIFEST or name.endswith(_STATE) else name
        for part, name in distinct_names(parts).items()
    }


def state_file(name: str) -> str:
    """Return the file name of a part's state; `name` as in `part_names`."""
    return f"{name}{_STATE}"


def write_state(folder: Path, name: str, state: Any) -> None:
    """Write a part's state as a pickle."""
    (folder / state_file(name)).write_bytes(pickle.dumps(state, protocol=5))


def read_state(folder: Path, name: str) -> Any:
    """Unpickle a state that `write_state` wrote."""
    return pickle.loads((folder / state_file(name)).read_bytes())


def _age(path: Path) -> tuple[int, str]:
    """Return the sort key of a checkpoint's step, which may have more than the usual 8 digits."""
    return len(path.name), path.name


def _files_of(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            yield path.relative_to(folder).as_posix()


def deleted(path: Path) -> FileNotFoundError:
    """Return the error for a file that was written, but has disappeared."""
    why = "it was deleted after it was written (does another program save or delete in this folder?)"
    return FileNotFoundError(errno.ENOENT, why, str(path))


def _check_are_folders(paths: Iterable[Path]) -> None:
    """Raise FileNotFoundError for a path that is no folder: that file was written and then deleted."""
    for path in paths:
        if not path.is_dir():
            raise deleted(path)


def _is_of_the_system(name: str) -> bool:
    """Return whether the system made the file: .DS_Store, or .nfs000… for a deleted file that is still open."""
    return name.rpartition("/")[2].startswith(".")


def _changes(file: Path, digest: str) -> list[str]:
    try:
        return [] if _sha256(file) == digest else ["its contents have changed (sha256 differs)"]
    except OSError as error:  # a broken disk
        return [f"cannot be read: {error}"]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_in_another_checkpoint(path: Path, aside: Path) -> bool:
    """Return whether a file in the folder `aside` is a hard link to the same file of a finished checkpoint beside it.

    Folders are not: their lists of names are new, and so are flushed. With them the new links survive a crash.
    """
    if path.is_dir() or path.stat().st_nlink == 1:
        return False
    same = (other / path.relative_to(aside) for other in reversed(checkpoints_in(aside.parent)))
    return any(other.exists() and other.samefile(path) for other in same)


def _sync_all(paths: Sequence[Path]) -> None:
    """Flush files and folders, several at a time: all flushes that are waited for share a write of the disk's journal.

    The order does not matter, as nothing refers to the folder before its rename.

    Raises:
        OSError: as `flush`.
    """
    left, errors = deque(paths), list[OSError]()

    def sync_some() -> None:
        try:
            while left and not errors:
                with contextlib.suppress(IndexError):  # another thread was faster
                    sync(left.popleft())
        except OSError as error:
            errors.append(error)

    threads: list[threading.Thread] = []
    with contextlib.suppress(RuntimeError):  # the system has no more threads, or Python ends: this thread does the rest
        for _ in range(min(_MOST_FLUSHES, len(paths)) - 1):
            threads.append(threading.Thread(target=sync_some, name="flush of a checkpoint"))
            threads[-1].start()
    sync_some()
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]


def sync(path: Path) -> None:
    """Flush a file's contents, or a folder's list of names, to the disk."""
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
            ValueError: an argument is invalid.
        """
        if keep_best < 0:
            raise ValueError(f"keep_best must be at least 0, got keep_best={keep_best}")
        if keep_best and monitor is None:
            raise ValueError(f"keep_best={keep_best} needs monitor=…, the name of the metric to compare")
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', got mode={mode!r}")
        self._keep_best = keep_best
        self._monitor = monitor
        self._sign = 1 if mode == "min" else -1

    def check(self, metrics: Mapping[str, float]) -> None:
        """Refuse a checkpoint's metrics that lack the monitored one: it may be misspelt.

        Raises:
            ValueError: lists the metrics that there are.
        """
        if metrics and self._monitor is not None and self._monitor not in metrics:
            raise ValueError(f"monitor={self._monitor!r} is not among the metrics {', '.join(metrics)}")

    def best_first(self, folder: Path) -> list[Checkpoint]:
        """Return the checkpoints that have the metric, the best first; of equal ones the oldest.

        Raises:
            ValueError: no `monitor` was given.
        """
        if self._monitor is None:
            raise ValueError("best() needs Checkpoints(..., monitor=…), the name of the metric to compare")
        name, found = self._monitor, []
        for path in checkpoints_in(folder):
            with contextlib.suppress(CheckpointError):
                checkpoint = open_checkpoint(path)
                if not math.isnan(checkpoint.metrics.get(name, math.nan)):
                    found.append(checkpoint)
        return sorted(found, key=lambda one: (self._sign * one.metrics[name], one.step))

    def kept(self, folder: Path) -> set[Path]:
        """Return the folders of the `keep_best` best checkpoints."""
        if not self._keep_best:
            return set()
        return {checkpoint.path for checkpoint in self.best_first(folder)[: self._keep_best]}
