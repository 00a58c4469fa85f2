"""The whole model, of which each worker has a part: its state, its fingerprint, and its checkpoints."""

import contextlib
import hashlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from lp_pipe.checkpoint.host_visibility import check_is_here
from lp_pipe.errors import CheckpointError, Unavailable
from lp_pipe.pipeline.conductor.workers import Workers
from lp_pipe.pipeline.config import PipelineConfig
from lp_pipe.pipeline.layers.model_names import formats_of, with_formats
from lp_pipe.pipeline.layers.state_shapes import check_names, check_shapes
from lp_pipe.pipeline.protocol import (
    AdoptCheckpoint,
    FindLoadable,
    ForgetShare,
    GetState,
    GetStateNames,
    HoldShare,
    PlanShare,
    ReadCheckpoint,
    RemoveShare,
    WriteShare,
)
from lp_pipe.pipeline.saving import METADATA
from lp_pipe.pipeline.saving.contents import Manifest
from lp_pipe.rpc.remote_error import headline
from lp_pipe.telemetry.names import name_list
from lp_pipe.training.share_file import remove_shares
from lp_pipe.training.tensor_archive import dense_parts, elements_of

_log = logging.getLogger(__name__)

_COPY_PATIENCE_S = 60.0  # a client asks at once for the copy to be written


class Copy(NamedTuple):
    """A checkpoint that is not written yet; the workers hold their shares of it."""

    version: str
    manifest: Manifest


class WholeModel:
    """The model of a pipeline. One thread uses it, between operations. The first replica speaks for all."""

    def __init__(self, config: PipelineConfig, workers: Workers) -> None:
        self._config = config
        self._workers = workers
        self._ranks = config.ranks.firsts
        self._holders = config.holders  # of what a checkpoint has
        self._unwritten: dict[str, float] = {}  # copies, with their time, that are not being written yet
        # Two saves into one folder: the one that ends first would delete the other's files as those of an older
        # checkpoint. Workers that read meanwhile might each read another checkpoint.
        self._one_at_a_time = threading.Lock()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state in the order of the layers: virtual stages of one worker may lie apart."""
        if self._config.zero == 3:
            parts = self._workers.run(lambda tag, rank: GetState(tag))[:1]
        else:
            parts = self._workers.some(self._ranks, GetState())
        formats = itertools.chain.from_iterable(formats_of(part).items() for part in parts)
        return with_formats(self._config.names.whole(parts), dict(formats))

    def copied_state(self) -> dict[str, Tensor]:
        """Return a copy of the state: the next operation may change this worker's tensors before they are sent."""
        state = self.state_dict()
        copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
        return with_formats(copies, formats_of(state))

    def checked(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state such that every worker can take its part of it.

        Raises:
            PipelineError: names are missing or unknown, or a shape differs; no worker has changed anything.
        """
        known = self.state_dict()
        check_names(state, known, "state_dict")
        check_shapes(state, known, "state_dict", self._taken)
        # As in one process, where layers share the parameter: the last value that is copied into it stays.
        position = {name: index for index, name in enumerate(known)}
        own = [{*names} & position.keys() for names in self._config.names.tied]  # hooks of state_dict may save others
        groups = [sorted(names, key=position.__getitem__) for names in own if names]
        tied = {name: state[names[-1]] for names in groups for name in names}
        return with_formats({**state, **tied}, formats_of(state))

    def _taken(self, state: dict[str, Tensor]) -> set[str]:
        return {name for names in self._workers.some(self._ranks, FindLoadable(state)) for name in names}

    def fingerprint(self) -> str:
        """Return the sha256 of all parameters and buffers."""
        digest = hashlib.sha256()
        for value in self.state_dict().values():
            if not isinstance(value, Tensor):
                continue  # a module's get_extra_state() may be anything
            for part in dense_parts(value.detach()):
                digest.update(elements_of(part.contiguous()))
        return digest.hexdigest()

    def save(self, path: Path, manifest: Manifest) -> None:
        """Write a checkpoint folder. The metadata comes last: without it the folder is no checkpoint."""
        self.write_copy(path, self._held(manifest, copy=False))

    def copy(self, manifest: Manifest) -> "Copy":
        """Copy what a checkpoint holds, in each worker's memory.

        A client may die before it asks for its copy to be written: the next copy drops one that has waited long.
        """
        for version, copied_at in list(self._unwritten.items()):
            if time.monotonic() - copied_at > _COPY_PATIENCE_S and self._unwritten.pop(version, None) is not None:
                self._workers.some(self._holders, ForgetShare(version))
        copied = self._held(manifest, copy=True)
        self._unwritten[copied.version] = time.monotonic()
        return copied

    def write_copy(self, path: Path, copy: "Copy") -> list[str]:
        """Write a copy; return the names of the files. Any thread may, while operations go on; one writes at a time.

        Raises:
            CheckpointError: the files cannot be written.
            Unavailable: the workers do not hold the copy any more.
        """
        self._unwritten.pop(copy.version, None)
        with _saying_where(path), self._or_forget(copy.version), self._one_at_a_time:
            return self._write(path, copy)

    def _held(self, manifest: Manifest, *, copy: bool) -> "Copy":
        # New names: the checkpoint that was there before stays complete until the new metadata replaces the old one.
        version = f"step-{manifest.step}-{secrets.token_hex(4)}"
        with self._or_forget(version):
            self._workers.some(self._holders, HoldShare(version, copy))
        return Copy(version, manifest)

    def _write(self, path: Path, copy: "Copy") -> list[str]:
        from lp_pipe.pipeline.saving.dcp_writing import WholePlan

        _make_folder(path)
        tied = [[("model", name) for name in names] for names in self._config.names.tied]
        whole = WholePlan(self._workers.some(self._holders, PlanShare(copy.version, copy.manifest)), tied)
        commands = [WriteShare(str(path), copy.version, left_out) for left_out in whole.left_out]
        try:
            written = self._workers.each(self._holders, commands)
            for share in written:
                if share.places:
                    check_is_here(path / share.file, share.writer)
            whole.finish(path, written)
            return [METADATA, *(share.file for share in written if share.places)]
        except Exception:
            self._remove(path, copy.version)
            raise

    def _remove(self, path: Path, version: str) -> None:
        """Remove the files of a checkpoint that has failed."""
        remove_shares(path, version)
        with contextlib.suppress(Exception):  # a worker that has died is the cause, or comes after it
            self._workers.some(self._holders, RemoveShare(str(path), version))

    @contextmanager
    def _or_forget(self, version: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # a worker that has died is the cause, or comes after it
                self._workers.some(self._holders, ForgetShare(version))
            raise

    def read(self, path: Path, *, strict: bool = True) -> Manifest:
        """Let every worker read its part of a checkpoint folder; nothing changes before `adopt`.

        strict: names and shapes must be those of this model.
        """
        with self._one_at_a_time:
            return self._read(path, strict=strict)

    def _read(self, path: Path, *, strict: bool) -> Manifest:
        from lp_pipe.pipeline.saving.dcp_reading import SavedFolder

        folder = SavedFolder(path)
        found = folder.manifest()
        own = self._workers.some(self._ranks, GetStateNames())
        known = {name for names in own for name in names}
        if strict:
            check_names(folder.names, known, f"{path} is a checkpoint", "; load(…, strict=False) takes what fits")
        elif unknown := {*folder.names} - known:
            _log.warning("%s: not in this model, and left out: %s", path, name_list(sorted(unknown)))
        if found.seed != self._config.seed:
            seeds = (found.seed, self._config.seed)
            _log.warning("%s was trained with seed %d, this model has %d: dropout will differ", path, *seeds)
        kept: dict[str, list[str]] = {}
        for of_worker in self._workers.all(ReadCheckpoint(str(path), strict)):
            for reason, names in of_worker.items():
                kept.setdefault(reason, []).extend(name for name in names if name not in kept[reason])
        for reason, names in kept.items():
            _log.warning("%s: %d %s: %s", path, len(names), reason, name_list(names))
        return found

    def adopt(self) -> None:
        """Let every worker go on from what it has read."""
        self._workers.all(AdoptCheckpoint())


@contextmanager
def _saying_where(path: Path) -> Iterator[None]:
    try:
        yield
    except Unavailable:  # an OSError, too
        raise
    except OSError as error:
        failure = CheckpointError(f"cannot save to {path}: {headline(error)}")
        failure.may_pass = True
        raise failure from error


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(
            f"cannot save to {path}: a checkpoint is a folder, but there is a file of that name, or in its path. Give "
            "another path, or use export(), which writes the weights alone into one file"
        ) from error
