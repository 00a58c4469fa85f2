"""The state of tables at one moment, written as files of a checkpoint while the tables go on."""

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lp_pipe.checkpoint.part_files import PartFile, PartFiles
from lp_pipe.rl.tree import Array
from lp_pipe.rpc.daemon_pool import settle

_STATE = "state.pickle"


class _HasSnapshot(Protocol):
    def snapshot(self) -> "TableSnapshot": ...


class TableSnapshot:
    """A table's state at one moment. The rows of the table are not copied: it calls `keep` before it changes some.

    A table's rows are divided into segments of equal size. Threads: `keep` is called by the thread that changes the
    table, all else by the one that writes the snapshot.

    small: what is small. versions: of each segment, another one after each change. contents: returns the bytes of a
    segment as it is now.
    """

    def __init__(self, small: dict[str, Any], versions: Array, contents: Callable[[int], bytes]) -> None:
        self.small = small
        self._versions: list[int] = versions.tolist()
        self._contents = contents
        self._lock = threading.Lock()
        self._is_waiting = np.ones(len(versions), dtype=bool)  # segments that are neither kept nor taken
        self._kept: dict[int, bytes] = {}
        self.is_open = True

    def keep(self, segments: Array) -> None:
        """Copy those of these segments that were not written yet; the table is about to change them."""
        segments = segments[segments < len(self._is_waiting)]  # the others had no items yet
        if self._is_waiting[segments].any():
            with self._lock:
                for segment in set(segments[self._is_waiting[segments]].tolist()):
                    self._kept[segment] = self._contents(segment)
                    self._is_waiting[segment] = False

    def close(self) -> None:
        """Let the table change without copies: the snapshot is written, or is not needed."""
        self.is_open = False
        self._kept.clear()

    def files(self, table: int) -> dict[str, PartFile]:
        """Return the segments as files of a checkpoint's part; `table` is the table's number in it."""
        numbered = enumerate(self._versions)
        return {segment_file(table, at): PartFile(version, partial(self._take, at)) for at, version in numbered}

    def _take(self, segment: int) -> bytes:
        with self._lock:
            found = self._kept.pop(segment, None) or self._contents(segment)
            self._is_waiting[segment] = False  # only now: `keep` does not wait for the lock once it sees this
        return found


class Snapshots:
    """The newest snapshot of some tables, and the files of the one before."""

    def __init__(self) -> None:
        self._files = PartFiles()
        self._own: Any = None
        self._tables: list[TableSnapshot] = []

    def take(self, own: Any, tables: Sequence[_HasSnapshot]) -> None:
        """Take the state of tables, with whatever belongs to them and does not change any more."""
        for unwritten in self._tables:
            unwritten.close()
        self._own, self._tables = own, [table.snapshot() for table in tables]

    def write(self, folder: Path) -> dict[str, str]:
        """Write what was taken into a new folder of a checkpoint; return the sha256 of the files.

        Segments that have not changed since the checkpoint before are links to its files.
        """
        (own, self._own), (tables, self._tables) = (self._own, None), (self._tables, [])
        contents: dict[str, PartFile] = {}
        for number, table in enumerate(tables):
            contents |= table.files(number)
        state = own, [table.small for table in tables]
        contents[_STATE] = PartFile(None, lambda: pickle.dumps(state, protocol=5))
        try:
            return self._files.write(folder, contents)
        finally:
            for table in tables:
                table.close()

    def write_in_thread(self, folder: Path) -> "Future[dict[str, str]]":
        """Write what was taken in a thread of its own, as `write` does."""
        written: Future[dict[str, str]] = Future()
        work = partial(self.write, folder)
        threading.Thread(target=settle, args=(written, work), name="checkpoint of a table", daemon=True).start()
        return written


def segment_file(table: int, segment: int) -> str:
    """Return the file name of a segment of a table."""
    return f"table-{table}-{segment:05}"


def read_snapshots(folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Return what belongs to the tables that were written into a folder, and what is small of each table.

    `TableState.load_segments` reads the rest.
    """
    own, tables = pickle.loads((folder / _STATE).read_bytes())
    return own, tables
