"""Files that are written whole or not at all."""

import os
import resource
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lp_pipe.telemetry.file_writing import write_atomically


def test_a_file_is_replaced_and_keeps_who_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    write_atomically(path, "old")
    path.chmod(0o640)
    write_atomically(path, "nöw")
    assert path.read_text(encoding="utf-8") == "nöw"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


@contextmanager
def no_room() -> Iterator[None]:
    """A limit on the size of files stands for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_where_there_is_no_room_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    write_atomically(path, "old")
    with no_room(), pytest.raises(OSError, match="File too large"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_down_leaves_nothing(tmp_path: Path) -> None:
    # A name of a file that is no UTF-8, for example. An empty one was left beside.
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "plan.toml", "\udcff")
    assert list(tmp_path.iterdir()) == []


def test_links_and_pipes_are_written_to(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("file")
    write_atomically(link, "through")
    assert (link.is_symlink(), (tmp_path / "file").read_text()) == (True, "through")
    os.mkfifo(pipe)
    writer = threading.Thread(target=write_atomically, args=(pipe, "through"))
    writer.start()
    assert pipe.read_text() == "through"
    writer.join(10)
