"""The files of a folder that are sources, and what a host keeps of them."""

import os
import subprocess
import time
from pathlib import Path

import pytest

import lp_pipe as lp
from lp_pipe.launch.hosts import source_tree
from lp_pipe.launch.hosts.source_tree import SourceTree, TreeFile, digest_of
from lp_pipe.launch.hosts.tree_store import TreeStore


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(tree: SourceTree) -> list[str]:
    return [file.path for file in tree.files]


def test_sources_are_what_git_knows_and_what_is_new(tmp_path: Path) -> None:
    write(tmp_path, {".gitignore": "*.bin\n", "train.py": "1", "removed.py": "1", "data/big.bin": "1", ".config": "1"})
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, "add", "train.py", "removed.py"], check=True)
    (tmp_path / "removed.py").unlink()
    write(tmp_path, {"new/model.py": "1"})
    assert names(SourceTree.of(tmp_path)) == [".config", ".gitignore", "new/model.py", "train.py"]
    assert names(SourceTree.of(tmp_path / "new")) == ["model.py"]


def test_without_git_sources_are_all_but_hidden_files_caches_and_virtual_environments(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "", "__pycache__/a.pyc": "", ".env": "", "venv/pyvenv.cfg": "", "venv/b.py": ""})
    os.symlink("a.py", tmp_path / "link.py")
    os.symlink("nowhere", tmp_path / "broken.py")
    assert names(SourceTree.of(tmp_path)) == ["a.py", "link.py"]


def test_a_tree_is_known_by_names_and_contents_wherever_it_is(tmp_path: Path) -> None:
    one = SourceTree.of(write(tmp_path / "1", {"a.py": "x"}))
    assert SourceTree.of(write(tmp_path / "2", {"a.py": "x"})).digest == one.digest
    assert SourceTree.of(write(tmp_path / "3", {"b.py": "x"})).digest != one.digest
    assert SourceTree.of(write(tmp_path / "4", {"a.py": "y"})).digest != one.digest


def test_a_folder_with_more_than_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"small.py": "x", "large.py": "x" * 100})
    monkeypatch.setattr(source_tree, "MAX_FILE_BYTES", 99)
    with pytest.raises(lp.LaunchError, match=r"cannot sync large\.py: .*leave data out with a \.gitignore"):
        SourceTree.of(tmp_path)
    monkeypatch.setattr(source_tree, "MAX_FILE_BYTES", 100)
    monkeypatch.setattr(source_tree, "MAX_TREE_BYTES", 100)
    with pytest.raises(lp.LaunchError, match=r"in 2 files, as in large\.py \(0 MiB\), small\.py"):
        SourceTree.of(tmp_path)
    with pytest.raises(lp.LaunchError, match="there is no such folder"):
        SourceTree.of(tmp_path / "absent")


def test_a_file_that_changes_while_it_is_sent_is_noticed(tmp_path: Path) -> None:
    tree = SourceTree.of(write(tmp_path, {"a.py": "before"}))
    write(tmp_path, {"a.py": "after"})
    with pytest.raises(lp.LaunchError, match=r"a\.py has changed while it was sent"):
        tree.read(tree.files[0])


def test_hosts_that_come_later_get_what_the_others_have_got(tmp_path: Path) -> None:
    # An elastic run ended with "has changed while it was sent" when a new host came after its user had saved a file.
    folder = write(tmp_path / "source", {"a.py": "before", "b.py": "before"})
    tree = TreeStore(tmp_path / "launcher").kept(SourceTree.of(folder))
    write(folder, {"a.py": "after"})
    assert [tree.read(file) for file in tree.files] == [b"before", b"before"]
    assert tree.root == str(folder)


def test_a_host_lacks_only_contents_that_it_has_not_seen(tmp_path: Path) -> None:
    folder = write(tmp_path / "source", {"a.py": "a", "b.py": "b", "copy_of_a.py": "a"})
    (folder / "b.py").chmod(0o755)
    store = TreeStore(tmp_path / "store")
    tree = SourceTree.of(folder)
    assert store.missing_contents(tree) == sorted([digest_of(b"a"), digest_of(b"b")])
    store.take([b"a", b"b"])
    assert store.missing_contents(tree) == []
    laid_out = Path(store.lay_out(tree))
    assert {path.name: path.read_text() for path in laid_out.iterdir()} == {
        "a.py": "a",
        "b.py": "b",
        "copy_of_a.py": "a",
    }
    assert os.access(laid_out / "b.py", os.X_OK)
    changed = SourceTree.of(write(folder, {"a.py": "new"}))
    assert store.missing_contents(changed) == [digest_of(b"new")]


def test_contents_that_are_damaged_on_the_host_come_again(tmp_path: Path) -> None:
    tree = SourceTree.of(write(tmp_path / "source", {"a.py": "a"}))
    store = TreeStore(tmp_path / "store")
    store.take([b"a"])
    laid_out = Path(store.lay_out(tree)) / "a.py"
    laid_out.chmod(0o600)
    laid_out.write_text("changed by a program")
    assert Path(store.lay_out(tree), "a.py").read_text() == "a"
    (kept,) = (tmp_path / "store").glob("objects/*/*")
    kept.chmod(0o600)
    kept.write_text("bits flipped")
    assert store.missing_contents(tree) == [digest_of(b"a")]


@pytest.mark.parametrize("path", ["../outside.py", "/etc/passwd", "a/../../b.py", ""])
def test_a_tree_cannot_reach_out_of_its_folder(tmp_path: Path, path: str) -> None:
    store = TreeStore(tmp_path / "store")
    store.take([b"a"])
    with pytest.raises(lp.LaunchError, match="not a path inside"):
        store.lay_out(SourceTree("", (TreeFile(path, digest_of(b"a"), 1, False),)))


def test_what_no_run_has_used_for_long_is_removed(tmp_path: Path) -> None:
    store = TreeStore(tmp_path / "store")
    old = SourceTree.of(write(tmp_path / "old", {"a.py": "old"}))
    new = SourceTree.of(write(tmp_path / "new", {"a.py": "new"}))
    store.take([b"old", b"new"])
    long_ago = time.time() - 100 * 24 * 3600
    tree = store.lay_out(old)
    for path in [tree, *(tmp_path / "store").glob(f"objects/*/{digest_of(b'old')[2:]}")]:
        os.utime(path, (long_ago, long_ago))
    assert os.path.isdir(store.lay_out(new))
    assert not os.path.exists(tree)
    assert store.missing_contents(old) and not store.missing_contents(new)


def test_a_host_that_cannot_keep_sources_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(lp.LaunchError, match=f"cannot keep sources below {tmp_path}/file/store"):
        TreeStore(tmp_path / "file" / "store").take([b"a"])
