"""Checkpoints on disks that are full, broken, or read-only: said clearly, and what was good stays good."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.checkpoint import Checkpoints, checkpoints_in
from lp_pipe.errors import CheckpointError
from tests.checkpoint import disks

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.skipif(bool(disks.why_not()), reason=disks.why_not() or "there are disks"),
]
needs_image = pytest.mark.skipif(bool(disks.why_no_image()), reason=disks.why_no_image() or "there are images")


class Block:
    """A part with so many bytes as its state."""

    def __init__(self, size: int = 0, before: Callable[[], object] = lambda: None) -> None:
        self.size = size
        self.before = before

    def state_dict(self) -> bytes:
        self.before()
        return bytes(self.size)

    def load_state_dict(self, state: bytes) -> None:
        self.size = len(state)


def restored(folder: Path) -> int:
    part = Block()
    Checkpoints({"block": part}, folder).restore()
    return part.size


def test_a_full_disk_is_said_and_an_older_checkpoint_stays_good(tmp_path: Path) -> None:
    def body() -> None:
        disks.mount_small(tmp_path / "disk", "512k")
        folder = tmp_path / "disk" / "checkpoints"
        part = Block(100_000)
        checkpoints = Checkpoints({"block": part}, folder)
        checkpoints.save(1)
        part.size = 1_000_000
        for wait in (True, False):
            with pytest.raises(CheckpointError, match=r"step 2 .*No space left on device"):
                checkpoints.save(2, wait=wait)
        assert [path.name for path in folder.iterdir()] == ["step-00000001"]
        assert restored(folder) == 100_000
        part.size = 200_000  # there is room again: what the failed ones had written is gone
        checkpoints.save(3)
        assert restored(folder) == 200_000
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000003"]

    disks.with_own_mounts(body)


def test_a_pipeline_that_saves_by_itself_says_where_it_could_not(tmp_path: Path) -> None:
    # A plain OSError, while the documentation has a CheckpointError there.
    def body() -> None:
        disks.mount_small(tmp_path / "full", "64k")
        (tmp_path / "full" / "filler").write_bytes(bytes(60_000))
        disks.mount_small(tmp_path / "read only", "64k")
        disks.make_read_only(tmp_path / "read only")
        with launched() as pipeline:
            for name, why in (("full", "No space left on device"), ("read only", "Read-only file system")):
                path = tmp_path / name / "checkpoint"
                for save in (pipeline.save, lambda path: pipeline.save_async(path).result()):
                    with pytest.raises(CheckpointError, match=rf"cannot save to {path}: .*{why}"):
                        save(path)

    disks.with_own_mounts(body)


def test_training_goes_on_beside_a_full_disk_if_told_so_and_saves_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stages write by themselves, and the node that saves gets their errors."""

    def body() -> None:
        disks.mount_small(tmp_path / "disk", "256k")
        filler = tmp_path / "disk" / "filler"
        filler.write_bytes(bytes(240_000))
        folder = tmp_path / "disk" / "checkpoints"
        with launched() as pipeline:
            checkpoints = Checkpoints({"pipeline": pipeline}, folder, may_fail=True)
            for step in range(6):
                if step == 4:
                    checkpoints.wait_until_written()
                    filler.unlink()
                pipeline.step(batch(step))
                checkpoints.save(step + 1, wait=False)
            checkpoints.wait_until_written()
            assert pipeline.fingerprint() == undisturbed(6)
        assert re.search(r"stages/\d.*: \[Errno 28\] No space left on device: '.*'", caplog.text)
        assert [path.name for path in checkpoints_in(folder)] == ["step-00000005", "step-00000006"]

    disks.with_own_mounts(body)


def test_a_read_only_disk_is_said_and_is_read_from(tmp_path: Path) -> None:
    def body() -> None:
        disks.mount_small(tmp_path / "disk")
        folder = tmp_path / "disk" / "checkpoints"
        checkpoints = Checkpoints({"block": Block(10)}, folder)
        checkpoints.save(1)
        disks.make_read_only(tmp_path / "disk")
        with pytest.raises(CheckpointError, match=r"step 2 could not be written.*Read-only file system"):
            checkpoints.save(2)
        assert restored(folder) == 10

    disks.with_own_mounts(body)


@needs_image
def test_a_disk_that_fails_only_when_it_is_flushed_gives_no_checkpoint(tmp_path: Path) -> None:
    """Writing succeeds (into memory); the error comes from fsync, and before the folder has its name."""

    def body() -> None:
        disks.mount_small(tmp_path / "below", "3m")
        disk = tmp_path / "disk"
        disks.mount_image(disk, tmp_path / "below", room="32m")
        try:
            folder = disk / "checkpoints"
            checkpoints = Checkpoints({"block": Block(1000)}, folder)
            checkpoints.save(1)
            with pytest.raises(CheckpointError, match="step 2 could not be written"):
                Checkpoints({"block": Block(8 << 20)}, folder).save(2)
            assert [path.name for path in checkpoints_in(folder)] == ["step-00000001"]
            assert restored(folder) == 1000
        finally:
            disks.unmount(disk)

    disks.with_own_mounts(body)


@needs_image
def test_a_disk_that_breaks_down_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body() -> None:
        disks.mount_small(tmp_path / "below", "8m")
        disk = tmp_path / "disk"
        disks.mount_image(disk, tmp_path / "below", room="4m")
        try:
            part = Block(1000)
            checkpoints = Checkpoints({"block": part}, disk / "checkpoints")
            checkpoints.save(1)
            part.before = lambda: disks.break_down(disk)  # after the folder was made, before the file is
            with pytest.raises(CheckpointError, match=r"step 2 could not be written to .*Input/output error"):
                checkpoints.save(2)
            part.before = lambda: None
            with pytest.raises(CheckpointError, match=r"step 3 could not be written to .*Input/output error"):
                checkpoints.save(3)
            Checkpoints({"block": part}, disk / "checkpoints", may_fail=True).save(4)
            assert "checkpoint of step 4 " in caplog.text
        finally:
            disks.unmount(disk)

    disks.with_own_mounts(body)


# --- A pipeline of two stages ---


@contextlib.contextmanager
def launched() -> Iterator[pp.PipelineClient]:
    layers = [pp.Layer(torch.nn.Linear, 8, 8), pp.Layer(torch.nn.Tanh), pp.Layer(torch.nn.Linear, 8, 8)]
    model = pp.Model(layers, torch.nn.functional.mse_loss, torch.optim.Adam)
    program = lp.Program("saved")
    pipeline = pp.add_pipeline(program, model, stages=2, microbatches=2)
    with lp.launch(program, "thread") as run:
        yield run.client(pipeline)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)


def undisturbed(steps: int) -> str:
    with launched() as pipeline:
        for step in range(steps):
            pipeline.step(batch(step))
        return pipeline.fingerprint()
