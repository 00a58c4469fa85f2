"""A part's files that have not changed are links to those of the checkpoint before, and all checkpoints stay whole."""

import errno
import os
import shutil
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from lp_pipe.checkpoint import Checkpoints, PartFile, PartFiles, checkpoints_in, folder, open_checkpoint
from lp_pipe.errors import CheckpointError


class Blocks:
    """A part of several blocks of bytes, which counts those that it writes."""

    def __init__(self) -> None:
        self.blocks = {f"block-{number}": (0, bytes([number]) * 1000) for number in range(5)}
        self.written: list[str] = []
        self._files = PartFiles()

    def change(self, name: str) -> None:
        version, contents = self.blocks[name]
        self.blocks[name] = version + 1, contents[1:] + b"x"

    def save_async(self, path: Path) -> "Future[dict[str, str]]":
        self.written = []
        done: Future[dict[str, str]] = Future()
        done.set_result(self._files.write(path, {name: self._file(name) for name in self.blocks}))
        return done

    def _file(self, name: str) -> PartFile:
        version, contents = self.blocks[name]

        def write() -> bytes:
            self.written.append(name)
            return contents

        return PartFile(version, write)

    def load(self, path: Path) -> None:
        self.blocks = {file.name: (-1, file.read_bytes()) for file in sorted(path.iterdir())}


def contents_of(blocks: Blocks) -> list[bytes]:
    return [contents for _, contents in blocks.blocks.values()]


def test_only_files_of_another_version_are_written(tmp_path: Path) -> None:
    part, other = Blocks(), Blocks()
    checkpoints = Checkpoints({"blocks": part}, tmp_path, keep=1)
    checkpoints.save(1)
    assert len(part.written) == 5
    part.change("block-3")
    checkpoints.save(2)
    assert part.written == ["block-3"]
    checkpoints.save(3)
    checkpoints.save(3)  # again, which replaces it
    assert not part.written and [path.name for path in checkpoints_in(tmp_path)] == ["step-00000003"]
    assert not open_checkpoint(tmp_path / "step-00000003").damage()
    Checkpoints({"blocks": other}, tmp_path).restore()
    assert contents_of(other) == contents_of(part)


class LinkingPart:
    """A part whose file is a link to one that is in no checkpoint."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def save_async(self, path: Path) -> "Future[None]":
        path.mkdir()
        os.link(self._file, path / "linked")
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def load(self, path: Path) -> None:
        pass


def test_a_checkpoint_flushes_what_no_checkpoint_before_has_flushed(tmp_path: Path, monkeypatch: Any) -> None:
    part, flushed, sync = Blocks(), list[str](), folder.sync
    (tmp_path / "linked").touch()
    checkpoints = Checkpoints({"blocks": part, "own": LinkingPart(tmp_path / "linked")}, tmp_path / "checkpoints")
    checkpoints.save(1)
    part.change("block-3")
    monkeypatch.setattr(folder, "sync", lambda path: flushed.append(path.name) or sync(path))
    checkpoints.save(2)
    aside = f".step-00000002.{os.getpid()}"
    assert sorted(flushed[:-1]) == sorted(["block-3", "blocks", "own", "manifest.json", aside])
    assert flushed[-1] == "checkpoints"  # with the new name
    flushed.clear()
    (tmp_path / "linked").unlink()
    (tmp_path / "linked").touch()
    checkpoints.save(3)
    assert "linked" in flushed and "block-3" not in flushed


def test_a_flush_that_fails_is_raised(tmp_path: Path, monkeypatch: Any) -> None:
    def fail(path: Path) -> None:
        if path.name == "block-3":
            raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(folder, "sync", fail)
    with pytest.raises(CheckpointError, match="block-3"):
        Checkpoints({"blocks": Blocks()}, tmp_path).save(1)
    assert checkpoints_in(tmp_path) == []


@pytest.mark.parametrize("what", ["deleted", "changed", "no links", "copied"])
def test_a_file_that_cannot_be_linked_is_written_again(what: str, tmp_path: Path, monkeypatch: Any) -> None:
    part = Blocks()
    checkpoints = Checkpoints({"blocks": part}, tmp_path)
    checkpoints.save(1)
    folder = tmp_path / "step-00000001" / "blocks"
    if what == "deleted":
        shutil.rmtree(folder.parent)
    elif what == "changed":
        (folder / "block-2").write_bytes(bytes(1000))
    elif what == "copied":
        os.rename(folder, tmp_path / "away")
        shutil.copytree(tmp_path / "away", folder)
    else:

        def refuse(*_: Any) -> None:
            raise PermissionError("no links here")

        monkeypatch.setattr(os, "link", refuse)
    checkpoints.save(2)
    assert part.written == (["block-2"] if what == "changed" else list(part.blocks))
    assert not open_checkpoint(tmp_path / "step-00000002").damage()
    checkpoints.save(3)
    assert (not part.written) == (what != "no links")


_KILLED = """
import os, signal, sys
from pathlib import Path
from lp_pipe.checkpoint import Checkpoints, PartFile
from tests.checkpoint.test_part_files import Blocks

part = Blocks()
checkpoints = Checkpoints({"blocks": part}, Path(sys.argv[1]))
checkpoints.save(1)
part.blocks["block-4"] = 1, b""
part._file = lambda name: PartFile(part.blocks[name][0], lambda: os.kill(os.getpid(), signal.SIGKILL))
checkpoints.save(2)
"""


def test_a_kill_during_a_checkpoint_leaves_the_one_before_whole(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], cwd=Path(__file__).parents[2], check=False)
    assert killed.returncode == -9
    (half,) = tmp_path.glob(".step-*")
    assert len(list((half / "blocks").iterdir())) == 4  # linked to those of the checkpoint before
    part = Blocks()
    checkpoints = Checkpoints({"blocks": part}, tmp_path)
    found = checkpoints.restore()
    assert found is not None and found.step == 1 and contents_of(part) == contents_of(Blocks())
    checkpoints.save(2)
    assert not half.exists() and not [path for path in checkpoints_in(tmp_path) if open_checkpoint(path).damage()]
