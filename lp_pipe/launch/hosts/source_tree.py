"""A folder of sources that the hosts are to have: which files, by their content."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from lp_pipe.errors import LaunchError

MAX_FILE_BYTES = 1 << 28
MAX_TREE_BYTES = 1 << 30
_BATCH_BYTES = 1 << 22  # sent in one message
_ADVICE = "sources are meant; leave data out with a .gitignore, and read it from where the hosts can reach it"


@dataclass(frozen=True)
class TreeFile:
    """path: relative, with slashes. digest: sha256 of the content."""

    path: str
    digest: str
    size: int
    is_executable: bool


@dataclass(frozen=True)
class SourceTree:
    """The contents of a folder when it was read. root: on the launcher's host.

    copy: where its files stay as they were, for hosts that come later; "": nowhere but in `root`.
    """

    root: str
    files: tuple[TreeFile, ...]
    copy: str = ""

    @classmethod
    def of(cls, folder: str | os.PathLike[str]) -> Self:
        """Git's view of the folder, if it is in a repository: what is tracked, and what is new and not ignored.

        Otherwise everything but hidden files, caches and virtual environments. Links are followed to files.

        Raises:
            LaunchError: there is no such folder, or it holds more than sources.
        """
        root = os.path.realpath(folder)
        if not os.path.isdir(root):
            raise LaunchError(f"cannot sync {os.fspath(folder)}: there is no such folder")
        files = tuple(_described(root, path) for path in sorted(_paths(root)))
        size = sum(file.size for file in files)
        if size > MAX_TREE_BYTES:
            largest = sorted(files, key=lambda file: -file.size)[:3]
            names = ", ".join(f"{file.path} ({file.size >> 20} MiB)" for file in largest)
            raise LaunchError(f"cannot sync {root}: {size >> 20} MiB in {len(files)} files, as in {names}; {_ADVICE}")
        return cls(root, files)

    @cached_property
    def digest(self) -> str:
        """Of names and contents, wherever the folder is."""
        lines = (f"{file.path}\0{file.digest}\0{file.is_executable}\n" for file in self.files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def files_with(self, digests: Iterable[str]) -> list[TreeFile]:
        """Return one file for each of these contents, which several files of the tree may have."""
        wanted = set(digests)
        return list({file.digest: file for file in self.files if file.digest in wanted}.values())

    def read(self, file: TreeFile) -> bytes:
        """
        Raises:
            LaunchError: it is not what it was.
        """
        try:
            data = Path(self.copy or self.root, file.path).read_bytes()
        except OSError as error:
            raise LaunchError(f"cannot sync {file.path}: {error}") from error
        if digest_of(data) != file.digest:
            raise LaunchError(f"{file.path} has changed while it was sent to the hosts; launch again")
        return data


def batches(files: Iterable[TreeFile]) -> Iterator[Sequence[TreeFile]]:
    """Split files into batches that fit in memory."""
    batch: list[TreeFile] = []
    for file in files:
        if batch and sum(other.size for other in batch) + file.size > _BATCH_BYTES:
            yield batch
            batch = []
        batch.append(file)
    if batch:
        yield batch


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _described(root: str, path: str) -> TreeFile:
    full = os.path.join(root, path)
    try:
        size = os.path.getsize(full)
        if size > MAX_FILE_BYTES:
            raise LaunchError(f"cannot sync {path}: it has {size >> 20} MiB; {_ADVICE}")
        data = Path(full).read_bytes()
    except OSError as error:
        raise LaunchError(f"cannot sync {path}: {error}") from error
    return TreeFile(path.replace(os.sep, "/"), digest_of(data), len(data), os.access(full, os.X_OK))


def _paths(root: str) -> Iterator[str]:
    """Return the paths of the files below `root`, relative to it."""
    known = _known_to_git(root)
    for path in _walked(root) if known is None else known:
        full = os.path.join(root, path)
        if os.path.isfile(full):  # left out: removed files, broken links, pipes
            yield path
        elif os.path.isdir(full) and not os.path.islink(full):  # a submodule
            yield from (os.path.join(path, below) for below in _paths(full))


def _known_to_git(root: str) -> list[str] | None:
    """Return git's list of files; None without git, or outside a repository."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, check=False)
    return None if done.returncode else [os.fsdecode(path) for path in set(done.stdout.split(b"\0")) if path]


def _walked(root: str) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not _is_left_out(os.path.join(folder, name), name)]
        for name in names:
            if not name.startswith(".") and not name.endswith(".pyc"):
                yield os.path.relpath(os.path.join(folder, name), root)


def _is_left_out(folder: str, name: str) -> bool:
    return name.startswith(".") or name == "__pycache__" or os.path.exists(os.path.join(folder, "pyvenv.cfg"))
