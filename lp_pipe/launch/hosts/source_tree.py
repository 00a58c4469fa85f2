"""A folder of sources that the hosts are to have: which files, by their content, and how they get there."""

import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from lp_pipe.errors import LaunchError
from lp_pipe.launch.hosts.agent_link import AgentLink

_log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 28
MAX_TREE_BYTES = 1 << 30
_BATCH_BYTES = 1 << 22  # so much travels at a time
_PATIENCE_S = 60.0  # for one batch to be on the host's disk
_HOSTS_AT_A_TIME = 16
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


def send_tree(tree: SourceTree, links: Mapping[str, AgentLink], is_up: Callable[[str], bool]) -> None:
    """Give every host what it lacks of the tree, and let it lay the tree out.

    is_up: whether a host is still there; for those that are lost meanwhile nothing is raised.

    Raises:
        LaunchError: names the host, and what went wrong there.
    """
    with ThreadPoolExecutor(_HOSTS_AT_A_TIME, "sync") as pool:
        sent = {name: pool.submit(_send, tree, link) for name, link in links.items()}
    for name, done in sent.items():
        error = done.exception()
        if error is None:
            lacked = done.result()
            size = sum(file.size for file in lacked)
            _log.info("host %s lacked %d of %d source files (%d bytes)", name, len(lacked), len(tree.files), size)
        elif is_up(name):
            raise LaunchError(f"host {name!r} has not got the sources of {tree.root}: {error}") from error


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _send(tree: SourceTree, link: AgentLink) -> list[TreeFile]:
    """Returns what the host lacked."""
    files = tree.files_with(link.ask("missing_contents", tree).result(_PATIENCE_S))
    for batch in batches(files):
        link.ask("take", [tree.read(file) for file in batch]).result(_PATIENCE_S)
    link.ask("lay_out", tree).result(_PATIENCE_S)
    return files


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
        if os.path.isfile(full):  # not so: tracked, but removed; a link to nowhere or to a folder; a pipe
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
