"""Source trees on an agent's host: contents by digest, and folders laid out of them; both stay for later runs."""

import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from lp_pipe.errors import LaunchError
from lp_pipe.launch.hosts.source_tree import SourceTree, TreeFile, batches, digest_of
from lp_pipe.user_folders import cache_folder

_KEPT_S = 90 * 24 * 3600.0  # since the last start of a program that used it


class TreeStore:
    """Below one folder of this user's. Agents of several runs may use it at a time: every file appears whole.

    What is there is looked at, not trusted: a file that a program has changed is laid out again.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_folder() / "sync"

    def missing_contents(self, tree: SourceTree) -> list[str]:
        """Return the digests of the contents that are not here."""
        return sorted({file.digest for file in tree.files if self._content(file.digest) is None})

    def take(self, contents: Sequence[bytes]) -> None:
        """Keep these.

        Raises:
            LaunchError: the disk is full, or this user may not write.
        """
        try:
            for data in contents:
                _write(self._object(digest_of(data)), data, mode=0o400)
        except OSError as error:
            raise LaunchError(f"cannot keep sources below {self._folder}: {error}") from error

    def kept(self, tree: SourceTree) -> SourceTree:
        """Return the tree with a copy on this host, so that later changes to the folder change no running program.

        Raises:
            LaunchError: as `take`; a file has changed meanwhile.
        """
        for batch in batches(tree.files_with(self.missing_contents(tree))):
            self.take([tree.read(file) for file in batch])
        return dataclasses.replace(tree, copy=self.lay_out(tree))

    def lay_out(self, tree: SourceTree) -> str:
        """Write the tree's folder and return it; its files are read-only, against changes by accident.

        Raises:
            LaunchError: it cannot be written, or the tree would reach out of its folder.
        """
        folder = self._folder / "trees" / tree.digest
        try:
            for file in tree.files:
                self._lay_out(folder / _checked(file.path), file)
            folder.mkdir(parents=True, exist_ok=True)  # a tree without files
            os.utime(folder)
            self._forget_old()
        except OSError as error:
            raise LaunchError(f"cannot lay out sources below {self._folder}: {error}") from error
        return str(folder)

    def _lay_out(self, path: Path, file: TreeFile) -> None:
        with contextlib.suppress(OSError):
            if digest_of(path.read_bytes()) == file.digest:
                return
        data = self._content(file.digest)
        if data is None:
            raise LaunchError(f"the content of {file.path} has not come")
        _write(path, data, mode=0o500 if file.is_executable else 0o400)

    def _content(self, digest: str) -> bytes | None:
        path = self._object(digest)
        try:
            data = path.read_bytes()
            if digest_of(data) != digest:
                return None
            os.utime(path)
        except OSError:
            return None
        return data

    def _object(self, digest: str) -> Path:
        return self._folder / "objects" / digest[:2] / digest[2:]

    def _forget_old(self) -> None:
        oldest = time.time() - _KEPT_S
        for path in [*self._folder.glob("objects/*/*"), *self._folder.glob("trees/*")]:
            with contextlib.suppress(OSError):  # another agent has just removed it
                if path.stat().st_mtime < oldest:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write(path: Path, data: bytes, mode: int) -> None:
    """Write the file as a whole or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _checked(path: str) -> PurePosixPath:
    found = PurePosixPath(path)
    if found.is_absolute() or ".." in found.parts or not found.parts:
        raise LaunchError(f"{path!r} is not a path inside a source tree")
    return found
