"""Parts of a program are saved together and restored together, from the newest checkpoint that is whole."""

import errno
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.checkpoint import Checkpoints, checkpoints_in, folder, host_visibility, open_checkpoint
from lp_pipe.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("no_leaks")


class Counter:
    """A part with a number as its state."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Slow:
    """A part that writes a folder of its own, once it may."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_write = threading.Event()
        self.value = "now"
        self._error = error

    def save_async(self, path: Path) -> "Future[None]":
        written: Future[None] = Future()
        value = self.value

        def write() -> None:
            self.may_write.wait(10)
            if self._error is not None:
                written.set_exception(self._error)
                return
            path.mkdir()
            (path / "value").write_text(value)
            written.set_result(None)

        threading.Thread(target=write).start()
        return written

    def load(self, path: Path) -> None:
        self.value = (path / "value").read_text()


def saved(folder: Path, *steps: int, **options: Any) -> Checkpoints:
    part = Counter()
    checkpoints = Checkpoints({"counter": part}, folder, **options)
    for step in steps:
        part.value = 10 * step
        checkpoints.save(step)
    return checkpoints


def restored(folder: Path) -> int:
    part = Counter(-1)
    Checkpoints({"counter": part}, folder).restore()
    return part.value


def test_restoring_brings_back_the_newest_checkpoint_and_only_some_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 10, keep=2)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000003", "step-00000010"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]
    assert restored(tmp_path) == 100


def test_the_newest_is_the_one_of_the_highest_step_however_many_digits_that_has(tmp_path: Path) -> None:
    # From a hundred million on, as frames of a game are counted, names were compared as words are.
    checkpoints = saved(tmp_path, 99_999_998, 99_999_999, 100_000_000, keep=2)
    found = checkpoints.restore()
    assert found is not None and found.step == 100_000_000
    assert [open_checkpoint(path).step for path in checkpoints_in(tmp_path)] == [99_999_999, 100_000_000]


@pytest.mark.parametrize("name", ["step-best", "step-00000001-copy"])
def test_a_copy_under_a_name_of_ones_own_is_left_alone(tmp_path: Path, name: str) -> None:
    # By its length the name was that of the oldest checkpoint, and so deleted, or of the newest, and so gone on from.
    checkpoints = saved(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    for step in (2, 3):
        checkpoints.save(step)
    found = checkpoints.restore()
    assert found is not None and found.step == 3
    assert open_checkpoint(tmp_path / name).step == 1


def test_one_that_was_moved_elsewhere_is_left_there_when_it_is_too_old(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "run", 1, keep=1)
    (tmp_path / "run" / "step-00000001").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "step-00000001").symlink_to(tmp_path / "elsewhere")
    checkpoints.save(2)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000002"]
    assert open_checkpoint(tmp_path / "elsewhere").damage() == []


def test_one_that_cannot_be_deleted_is_a_warning_and_the_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training ended: "the checkpoint of step 3 could not be written", though it was there."""
    rename = Path.rename

    def guarded(path: Path, target: Path) -> Path:
        if path.name == "step-00000001":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", guarded)
    saved(tmp_path, 1, 2, 3, keep=1)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000001", "step-00000003"]
    assert "step-00000001: [Errno 1] Operation" in caplog.text


def test_all_of_it_is_on_the_disk_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    monkeypatch.setattr(folder, "sync", lambda path: synced.add(path.name))
    aside = folder.begin(tmp_path, 1)
    (aside / "part" / "inner").mkdir(parents=True)
    (aside / "part" / "inner" / "file").touch()
    folder.finish(aside, 1, {"part": ()})
    assert synced >= {"file", "inner", "part", aside.name, "manifest.json", tmp_path.name}


def test_without_a_checkpoint_nothing_is_restored(tmp_path: Path) -> None:
    part = Counter(7)
    assert Checkpoints({"counter": part}, tmp_path / "none").restore() is None
    assert part.value == 7


def test_what_is_left_of_a_killed_process_is_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    (tmp_path / ".step-00000002.4711").mkdir()
    (tmp_path / ".step-00000002.4711" / "counter.state").write_bytes(b"half of it")
    assert restored(tmp_path) == 10
    saved(tmp_path, 3)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("file", ["counter.state", "manifest.json"])
def test_every_flipped_bit_is_found_and_an_older_checkpoint_restored(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / file
    data = path.read_bytes()
    for position in range(0, 8 * len(data), 41):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        path.write_bytes(changed)
        assert restored(tmp_path) == 10
    assert file in caplog.text
    path.write_bytes(data)
    assert restored(tmp_path) == 20


@pytest.mark.parametrize("damage", ["torn", "missing", "foreign"])
def test_files_that_are_torn_or_missing_or_too_many_are_named(tmp_path: Path, damage: str) -> None:
    saved(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    if damage == "torn":
        with (folder / "counter.state").open("r+b") as file:
            file.truncate(5)
    elif damage == "missing":
        (folder / "counter.state").unlink()
    else:
        (folder / "other.state").write_bytes(b"")
    found = open_checkpoint(folder).damage()
    assert len(found) == 1
    assert ("other.state" if damage == "foreign" else "counter.state") in found[0]
    with pytest.raises(CheckpointError, match="all checkpoints are damaged"):
        restored(tmp_path)


@pytest.mark.parametrize("name", [".DS_Store", ".nfs000000000a1b2c3d00000001"])
def test_what_file_systems_leave_in_a_folder_does_not_damage_a_checkpoint(tmp_path: Path, name: str) -> None:
    saved(tmp_path, 1)
    (tmp_path / "step-00000001" / name).write_bytes(b"")
    assert restored(tmp_path) == 10


def test_a_checkpoint_that_cannot_be_written_is_an_error_or_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1)
    part = Slow(OSError(28, "No space left on device"))
    part.may_write.set()
    with pytest.raises(CheckpointError, match=r"step 2 could not be written .*No space left on device"):
        Checkpoints({"slow": part}, tmp_path).save(2)
    Checkpoints({"slow": part}, tmp_path, may_fail=True).save(2)
    assert "checkpoint of step 2 " in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_cannot_be_read_counts_as_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 1, 2)
    manifest = tmp_path / "step-00000002" / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    assert restored(tmp_path) == 10
    assert "Is a directory" in caplog.text


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_later_one_never_takes_the_place_of_the_one_just_written(tmp_path: Path, keep: int) -> None:
    saved(tmp_path, 10, 20, 30)
    (tmp_path / "step-00000030" / "counter.state").write_bytes(b"")
    saved(tmp_path, 25, keep=keep)
    assert restored(tmp_path) == 250
    assert len(checkpoints_in(tmp_path)) == keep + 1


def test_a_checkpoint_that_is_replaced_is_there_whenever_the_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 5)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if target.name == "step-00000005":
            raise SystemExit  # as good as SIGKILL: nobody puts anything in order
        return rename(path, target)

    part = Counter(51)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        aside = folder.begin(tmp_path, 5)
        folder.write_state(aside, "counter", part.state_dict())
        with pytest.raises(SystemExit):
            folder.finish(aside, 5, {"counter": ()})
    assert checkpoints_in(tmp_path) == []
    assert restored(tmp_path) == 50
    Checkpoints({"counter": part}, tmp_path, keep=1).save(5)
    assert restored(tmp_path) == 51
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


class Deleting(Slow):
    """A second program that saves to the same folder, and clears up what it finds there."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def save_async(self, path: Path) -> "Future[list[str]]":  # type: ignore[override]
        path.mkdir()
        (path / "value").write_text("now")
        found = path.parent / self._what
        shutil.rmtree(found) if found.is_dir() else found.unlink()
        written: Future[list[str]] = Future()
        written.set_result(["value"])
        return written


@pytest.mark.parametrize("what", ["part/value", "part", "counter.state", "."])
def test_what_was_deleted_while_it_was_written_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Regression: the remaining files counted as a whole checkpoint, and older ones were deleted for it."""
    monkeypatch.setattr(host_visibility, "_APPEARS_WITHIN_S", 0.0)
    parts = {"counter": Counter(1), "part": Slow()}
    parts["part"].may_write.set()
    Checkpoints(parts, tmp_path, keep=1).save(1)
    with pytest.raises(CheckpointError, match=r"step 2 could not be written to .*(does|has) another program"):
        Checkpoints({**parts, "part": Deleting(what)}, tmp_path, keep=1).save(2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_part_that_raises_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    class Broken(Counter):
        def state_dict(self) -> dict[str, int]:
            raise ValueError("no state")

    slow = Slow()
    slow.may_write.set()
    with pytest.raises(ValueError, match="no state") as caught:
        Checkpoints({"slow": slow, "broken": Broken()}, tmp_path).save(1)
    assert "part 'broken'" in caught.value.__notes__[0]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"step 1 could not be written"):
        saved(tmp_path / "file" / "checkpoints", 1)


def test_training_goes_on_while_a_copy_is_written(tmp_path: Path) -> None:
    part, trainer = Slow(), Counter(1)
    checkpoints = Checkpoints({"slow": part, "trainer": trainer}, tmp_path)
    checkpoints.save(1, wait=False)
    part.value, trainer.value = "later", 2
    assert not checkpoints_in(tmp_path)
    part.may_write.set()
    checkpoints.wait_until_written()
    checkpoints.restore()
    assert (part.value, trainer.value) == ("now", 1)


def test_to_restore_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    # It brought back the one before.
    slow = Slow()
    checkpoints = Checkpoints({"slow": slow}, tmp_path)
    slow.may_write.set()
    checkpoints.save(1)
    slow.may_write.clear()
    slow.value = "then"
    checkpoints.save(2, wait=False)
    threading.Timer(0.1, slow.may_write.set).start()
    found = checkpoints.restore()
    assert found is not None and found.step == 2
    assert slow.value == "then"


def test_an_error_in_the_background_is_raised_by_the_next_save(tmp_path: Path) -> None:
    part = Slow(OSError(5, "Input/output error"))
    part.may_write.set()
    checkpoints = Checkpoints({"slow": part}, tmp_path)
    checkpoints.save(1, wait=False)
    with pytest.raises(CheckpointError, match=r"step 1 could not be written .*Input/output error"):
        checkpoints.save(2)


def test_a_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"parts counter, .* has other"):
        Checkpoints({"other": Counter()}, tmp_path).restore()


def test_nodes_take_part_by_two_methods(tmp_path: Path) -> None:
    """A client of a CourierNode is a part like any other; the run's folder is where checkpoints go by default."""

    def train(counter: Any, add: int) -> None:
        checkpoints = Checkpoints({"counter": counter})
        checkpoints.restore()
        counter.load_state_dict({"value": counter.state_dict()["value"] + add})
        checkpoints.save(add)
        lp.stop()

    for add in (1, 5):
        program = lp.Program("counting")
        counter = program.add_node(lp.CourierNode(Counter), label="counter")
        program.add_node(lp.PyNode(train, counter, add), label="trainer")
        lp.launch(program, "thread", run_dir=tmp_path).wait(30)
    assert restored(tmp_path / "checkpoints") == 6


def test_a_node_that_fails_ends_once_its_checkpoint_is_written(tmp_path: Path) -> None:
    """A program that was resumed in the same process had its own taken away by the writing of the one before."""
    slow = Slow()

    def train() -> None:
        Checkpoints({"slow": slow}).save(1, wait=False)
        threading.Timer(0.2, slow.may_write.set).start()
        raise RuntimeError("failed while a checkpoint is being written")

    program = lp.Program("failing")
    program.add_node(lp.PyNode(train), label="trainer")
    with pytest.raises(lp.NodeError, match="failed while"):
        lp.launch(program, "thread", run_dir=tmp_path, serialize_py_nodes=False).wait(30)
    assert [path.name for path in checkpoints_in(tmp_path / "checkpoints")] == ["step-00000001"]


def test_at_least_one_checkpoint_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints({}, tmp_path, keep=0)


def test_parts_may_have_any_name(tmp_path: Path) -> None:
    names = [
        "a/b",
        "a-b",
        "A",
        "a",
        "x",
        "x.state",
        "manifest.json",
        "..",
        ".",
        "",
        "L" * 300,
        "n\0",
        "größe",
        "stages/0",
    ]
    saved = {name: Counter(place) for place, name in enumerate(names)}
    folders = {name: Slow() for name in ("x/y", "x_y", "y.state", "Y", "y")}
    for name, part in folders.items():
        part.value = name
        part.may_write.set()
    Checkpoints({**saved, **folders}, tmp_path).save(1)
    (path,) = checkpoints_in(tmp_path)
    assert open_checkpoint(path).parts == (*names, *folders)
    assert (path / "a-b.state").is_file() and (path / "x_y").is_dir()
    found = {name: Counter() for name in names}
    found_folders = {name: Slow() for name in folders}
    Checkpoints({**found_folders, **found}, tmp_path).restore()
    assert [part.value for part in found.values()] == list(range(len(names)))
    assert {name: part.value for name, part in found_folders.items()} == {name: name for name in folders}


class Training:
    """Counts its steps, keeps its states in memory, and loses a worker before step `dies_before`, once."""

    def __init__(self, dies_before: int | None = None, loses: tuple[int, ...] = ()) -> None:
        self.done = 0
        self.held: list[int] = []
        self._dies_before = dies_before
        self._loses = loses

    def current_step(self) -> int:
        return self.done

    def steps(self, n: int) -> Iterator[Any]:
        for _ in range(n):
            if self.done == self._dies_before:
                self._dies_before = None
                self.done = -1
                raise lp.Unavailable("a worker has died")
            self.done += 1
            yield SimpleNamespace(step=self.done - 1)

    def recover(self) -> None:
        self.held = [step for step in self.held if step not in self._loses]

    def mirror(self) -> int:
        self.held.append(self.done)
        return self.done

    def mirrored_steps(self) -> list[int]:
        return self.held

    def go_back(self, step: int) -> None:
        self.done = step

    def save_async(self, path: Path) -> "Future[None]":
        path.mkdir()
        (path / "step").write_text(str(self.done))
        written: Future[None] = Future()
        written.set_result(None)
        return written

    def load(self, path: Path) -> None:
        self.done = int((path / "step").read_text())


@pytest.mark.parametrize(
    ("mirror_every", "loses", "comes_again"),
    [(1, (), []), (1, (7,), [6]), (1, (6, 7), [4, 5, 6]), (3, (6,), [4, 5, 6]), (3, (), [6]), (2, (6,), [4, 5, 6])],
    ids=[
        "to the newest state in memory",
        "to the one before",
        "to the checkpoint, when both are lost",
        "to the checkpoint, when it is newer than the one before",
        "to the state in memory, when it is newer than the checkpoint",
        "to the one in memory, when the checkpoint is no newer",
    ],
)
def test_after_a_death_all_parts_go_back_as_little_as_they_can(
    tmp_path: Path, mirror_every: int, loses: tuple[int, ...], comes_again: list[int]
) -> None:
    training, counter = Training(dies_before=7, loses=loses), Counter()
    steps = []

    def train() -> None:
        checkpoints = Checkpoints({"training": training, "counter": counter}, tmp_path / "checkpoints")
        for result in checkpoints.steps(training, 9, save_every=4, mirror_every=mirror_every):
            counter.value += 1
            steps.append(result.step)

    program = lp.Program("mirrors")
    program.add_node(lp.PyNode(train), label="trainer")
    lp.launch(program, "thread", run_dir=tmp_path).wait(20)
    assert steps == [*range(7), *comes_again, 7, 8]
    assert counter.value == 9


def test_a_loop_of_ones_own_goes_back_to_the_newest_checkpoint_after_a_death(tmp_path: Path) -> None:
    training = Training(dies_before=7)
    steps, is_ended_by_death = [], []

    def train() -> None:
        checkpoints = Checkpoints({"training": training}, tmp_path / "checkpoints")
        assert checkpoints.begin(training) is None
        while training.current_step() < 9:
            is_ended_by_death.append(True)
            with checkpoints.recovering(training):
                steps.extend(result.step for result in training.steps(3))
                checkpoints.save(training.current_step(), wait=False)
                is_ended_by_death[-1] = False
        checkpoints.wait_until_written()

    program = lp.Program("rounds")
    program.add_node(lp.PyNode(train), label="trainer")
    lp.launch(program, "thread", run_dir=tmp_path).wait(20)
    assert steps == [*range(7), 6, 7, 8]
    assert is_ended_by_death == [False, False, True, False]


def test_what_is_no_death_leaves_the_loop(tmp_path: Path) -> None:
    training = Training()

    def train() -> None:
        checkpoints = Checkpoints({"training": training}, tmp_path / "checkpoints")
        checkpoints.begin(training)
        with checkpoints.recovering(training):
            raise ValueError("a mistake")

    program = lp.Program("mistaken")
    program.add_node(lp.PyNode(train), label="trainer")
    with pytest.raises(lp.NodeError, match="ValueError: a mistake"):
        lp.launch(program, "thread", run_dir=tmp_path).wait(20)


def test_the_beginning_is_saved_once_and_then_gone_on_from(tmp_path: Path) -> None:
    begun = []

    def begin() -> None:
        training = Training()
        training.done = len(begun)
        begun.append(Checkpoints({"training": training}, tmp_path / "checkpoints").begin(training))
        assert training.done == 0

    for run in range(2):
        program = lp.Program("begun")
        program.add_node(lp.PyNode(begin), label="trainer")
        lp.launch(program, "thread", run_dir=tmp_path / str(run)).wait(20)
    assert [found and found.step for found in begun] == [None, 0]


def test_a_part_that_cannot_stay_in_memory_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints({"slow": Slow()}, tmp_path)
    with pytest.raises(ValueError, match=r"part 'slow' .*no mirror\(\)"):
        next(checkpoints.steps(Training(0), 1, save_every=1, mirror_every=1))
    with pytest.raises(ValueError, match="mirror_every=0"):
        next(checkpoints.steps(Training(0), 1, save_every=1, mirror_every=0))
