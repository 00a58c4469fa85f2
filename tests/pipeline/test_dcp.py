"""Workers write and read a torch Distributed Checkpoint without a process group."""

import io
import os
import pickle
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties

from lp_pipe.errors import CheckpointError, PipelineError
from lp_pipe.pipeline.saving.contents import ENTRY, Manifest
from lp_pipe.pipeline.saving.dcp_reading import SavedFolder
from lp_pipe.pipeline.saving.dcp_writing import WholePlan
from lp_pipe.training.gradients import LossScale
from lp_pipe.training.share_file import EntryKey, Share
from lp_pipe.training.tensor_parts import boxes_of_range, part_of_range

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MANIFEST = Manifest(step=3, seed=1, loss_scale=LossScale(2.0, 5))


def write(
    folder: Path,
    shares: Sequence[Mapping[EntryKey, Any]],
    version: str = "step-3-a",
    tied: Sequence[Sequence[EntryKey]] = (),
) -> None:
    """Write as the conductor and its workers do."""
    folder.mkdir(exist_ok=True)
    writers = [Share({ENTRY: MANIFEST.as_entry(), **share}, copy=False) for share in shares]
    whole = WholePlan([writer.describe() for writer in writers], tied)
    pairs = enumerate(zip(writers, whole.left_out, strict=True))
    whole.finish(
        folder, [writer.write(str(folder), version, worker, "here", others) for worker, (writer, others) in pairs]
    )


def weights(**values: Any) -> dict[EntryKey, Any]:
    return {("model", name): value for name, value in values.items()}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_workers_write_is_read_back_to_the_bit(tmp_path: Path) -> None:
    odd: dict[str, Any] = {
        "transposed": torch.randn(3, 4).T,
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "slice_of_more": torch.randn(100)[3:7],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "bf16": torch.randn(5).bfloat16(),
        "int64": torch.arange(3),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "no_tensor": {"nested": [1, (2.0, None)], "tensor": torch.ones(2)},
    }
    write(tmp_path, [weights(**odd)])
    found = SavedFolder(tmp_path)
    assert (found.manifest(), found.names) == (MANIFEST, [*odd])
    for (_, name), value in found.read(weights(**odd)).items():
        if isinstance(value, Tensor):
            assert value.dtype == odd[name].dtype and torch.equal(value, odd[name]), name
    nested = found.read([("model", "no_tensor")])["model", "no_tensor"]
    assert nested["nested"] == [1, (2.0, None)] and torch.equal(nested["tensor"], torch.ones(2))


def test_a_changed_byte_is_found_before_it_is_loaded(tmp_path: Path) -> None:
    # Torch compares no checksums: it loaded other weights in silence.
    write(tmp_path, [weights(a=torch.full((100,), 2.0), b=torch.ones(2))])
    file = next(tmp_path.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[content.index(torch.full((100,), 2.0).numpy().tobytes()) + 7] ^= 1
    file.write_bytes(content)
    found = SavedFolder(tmp_path)
    assert found.damage() == [f"{file.name}: model.a: its contents have changed (CRC-32 differs)"]
    with pytest.raises(CheckpointError, match=rf"cannot read .*{file.name}.*model\.a: its contents have changed"):
        found.read([("model", "a")])
    assert torch.equal(found.read([("model", "b")])["model", "b"], torch.ones(2))


class Acts:
    """A pickle that does more than data: it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("form", ["torch's", "plain"])
@pytest.mark.parametrize("key", [ENTRY, ("model", "a"), ("model", "no_tensor")])
def test_a_part_that_was_changed_with_its_metadata_runs_no_code(tmp_path: Path, key: EntryKey, form: str) -> None:
    folder, trace, content = tmp_path / "checkpoint", tmp_path / "trace", io.BytesIO()
    write(folder, [weights(a=torch.ones(3), no_tensor={"lr": 0.1})])
    torch.save([Acts(trace)], content) if form == "torch's" else pickle.dump([Acts(trace)], content)
    described = pickle.loads((folder / ".metadata").read_bytes())
    for index, stored in described.storage_data.items():
        if index.fqn == ".".join(key):
            stored.relative_path, stored.offset, stored.length = "changed.distcp", 0, len(content.getvalue())
    (folder / "changed.distcp").write_bytes(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(described))
    found = SavedFolder(folder)
    with pytest.raises(CheckpointError, match=r"changed\.distcp"):
        found.read([key])
    assert not trace.exists()


def test_who_needs_a_part_reads_the_files_that_have_it(tmp_path: Path) -> None:
    write(tmp_path, [weights(a=torch.ones(2)), weights(b=torch.zeros(2))])
    assert files(tmp_path) == [".metadata", "step-3-a-worker-0_0.distcp", "step-3-a-worker-1_0.distcp"]
    (tmp_path / "step-3-a-worker-1_0.distcp").unlink()
    found = SavedFolder(tmp_path)
    assert torch.equal(found.read([("model", "a")])["model", "a"], torch.ones(2))
    with pytest.raises(CheckpointError, match=r"cannot read .*worker-1_0\.distcp"):
        found.read([("model", "b")])


def test_an_entry_that_several_workers_have_is_written_by_the_first(tmp_path: Path) -> None:
    write(tmp_path, [weights(a=torch.ones(1000)), weights(a=torch.ones(1000))])
    assert files(tmp_path) == [".metadata", "step-3-a-worker-0_0.distcp"]  # nothing was left to the other


@pytest.mark.parametrize("workers", [1, 2])
def test_a_tied_parameter_is_written_once_and_read_under_each_name(tmp_path: Path, workers: int) -> None:
    value = torch.randn(100_000)
    first, last = weights(embedding=value), weights(other=torch.ones(3), head=value.clone())
    shares = [first, last] if workers == 2 else [{**first, **last}]
    write(tmp_path, shares, tied=[[("model", "embedding"), ("model", "head")]])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1.2 * value.nbytes
    read = SavedFolder(tmp_path).read([("model", "embedding"), ("model", "head")])
    assert all(torch.equal(found, value) for found in read.values())
    plain = {"model": {"embedding": torch.zeros(100_000), "head": torch.zeros(100_000), "other": torch.zeros(3)}}
    dcp.load(plain, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(plain["model"]["head"], value) and torch.equal(plain["model"]["embedding"], value)


def test_a_folder_is_the_old_checkpoint_until_it_is_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch removed the old .metadata before it renamed the new one: killed between, there was none."""

    def broken(*_: Any) -> None:
        raise OSError("the disk is gone")

    write(tmp_path, [weights(a=torch.zeros(2))], "step-1-a")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", broken)
        with pytest.raises(OSError, match="the disk is gone"):
            write(tmp_path, [weights(a=torch.ones(2))], "step-2-b")
    assert torch.equal(SavedFolder(tmp_path).read([("model", "a")])["model", "a"], torch.zeros(2))
    write(tmp_path, [weights(a=torch.ones(2))], "step-3-c")
    assert torch.equal(SavedFolder(tmp_path).read([("model", "a")])["model", "a"], torch.ones(2))
    assert [name for name in files(tmp_path) if name.endswith(".distcp")] == ["step-3-c-worker-0_0.distcp"]


def test_the_older_files_stay_until_the_new_name_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a power cut could undo the metadata's renaming, whose older files had been deleted."""
    there: list[list[str]] = []

    def fsync(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == tmp_path.stat().st_ino:
            there.append(files(tmp_path))

    write(tmp_path, [weights(a=torch.zeros(2))], "step-1-a")
    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path, [weights(a=torch.ones(2))], "step-2-b")
    assert there == [[".metadata", "step-1-a-worker-0_0.distcp", "step-2-b-worker-0_0.distcp"]]
    assert files(tmp_path) == [".metadata", "step-2-b-worker-0_0.distcp"]


@pytest.mark.parametrize("broken", ["iterdir", "unlink"])
def test_older_files_that_cannot_be_deleted_do_not_spoil_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A folder that could not be listed failed the save, which then deleted what the new metadata names."""

    def fail(*_: Any) -> None:
        raise OSError("stale file handle")

    write(tmp_path, [weights(a=torch.zeros(2))], "step-1-a")
    with monkeypatch.context() as patch:
        patch.setattr(Path, broken, fail)
        write(tmp_path, [weights(a=torch.ones(2))], "step-2-b")
    assert torch.equal(SavedFolder(tmp_path).read([("model", "a")])["model", "a"], torch.ones(2))


def test_a_folder_without_metadata_was_never_finished(tmp_path: Path) -> None:
    Share(weights(a=torch.ones(1)), copy=False).write(str(tmp_path), "step-1-a", 0, "here", ())
    with pytest.raises(
        CheckpointError, match=rf"{tmp_path} is no checkpoint: without \.metadata it was never finished"
    ):
        SavedFolder(tmp_path)


def test_a_folder_that_is_not_there_and_a_programs_checkpoint_are_not_called_unfinished(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"typo is no checkpoint: there is no such folder"):
        SavedFolder(tmp_path / "typo")
    write(tmp_path / "pipeline", [weights(a=torch.ones(1))], "step-1-a")
    with pytest.raises(CheckpointError, match=rf"{tmp_path} is no checkpoint: .* give {tmp_path}/pipeline$"):
        SavedFolder(tmp_path)


def test_metadata_that_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    """A missing permission sent its user to look for an older checkpoint."""
    (tmp_path / ".metadata").mkdir()
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: Is a directory"):
        SavedFolder(tmp_path)


def test_every_torn_metadata_is_damage(tmp_path: Path) -> None:
    write(tmp_path, [weights(a=torch.ones(1))])
    whole = (tmp_path / ".metadata").read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / ".metadata").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
            SavedFolder(tmp_path)


def test_a_sparse_tensor_is_refused_by_its_name() -> None:
    with pytest.raises(PipelineError, match=r"model\.mask is a tensor of layout torch\.sparse_coo"):
        Share(weights(mask=torch.eye(2).to_sparse()), copy=True)


def test_metadata_of_a_later_torch_that_say_more_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch 2.15's were "damaged" to 2.13, and a resume left them out.
    known = TensorProperties.__getstate__
    with monkeypatch.context() as later:
        later.setattr(TensorProperties, "__getstate__", lambda self: (*known(self), (4, 1)))
        write(tmp_path, [weights(a=torch.arange(3.0))])
    folder = SavedFolder(tmp_path)
    assert torch.equal(folder.read(folder.keys)["model", "a"], torch.arange(3.0))


def test_the_metadata_says_what_torch_itself_would_say(tmp_path: Path) -> None:
    state = {"0.weight": torch.randn(3, 4), "0.bias": torch.randn(3).bfloat16(), "scalar": torch.tensor(1.0)}
    write(tmp_path / "ours", [{**weights(**state), ("lr_scheduler",): 7}])
    dcp.save({"model": state, "lr_scheduler": 7, "lp_pipe": 3}, checkpoint_id=tmp_path / "torch", no_dist=True)
    ours, theirs = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "torch"))
    for entry in theirs.state_dict_metadata.values():
        if hasattr(getattr(entry, "properties", None), "strides"):
            entry.properties.strides = None  # from torch 2.15 on; it notes them, and reads them nowhere
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    assert ours.version == theirs.version


def test_a_copy_is_of_the_moment_at_which_it_was_taken(tmp_path: Path) -> None:
    tensor, options = torch.zeros(3), {"lr": 1.0}
    share = Share({ENTRY: MANIFEST.as_entry(), ("model", "a"): tensor, ("options", "0"): options}, copy=True)
    tensor.add_(1)
    options["lr"] = 2.0
    whole = WholePlan([share.describe()], ())
    whole.finish(tmp_path, [share.write(str(tmp_path), "step-3-a", 0, "here", ())])
    found = SavedFolder(tmp_path).read([("model", "a"), ("options", "0")])
    assert torch.equal(found["model", "a"], torch.zeros(3)) and found["options", "0"] == {"lr": 1.0}


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (2, 3, 4), (1, 1, 9)])
@pytest.mark.parametrize("writers", [1, 2, 5])
def test_parts_of_tensors_are_read_as_any_other_parts(tmp_path: Path, shape: tuple[int, ...], writers: int) -> None:
    whole = torch.randn(shape)
    cuts = [whole.numel() * rank // writers for rank in range(writers + 1)]
    shares = [{("model", "a"): part_of_range(whole.reshape(-1)[a:b], shape, a)} for a, b in pairwise(cuts)]
    write(tmp_path, [{**share, **weights(same=torch.ones(2))} for share in shares])
    found = SavedFolder(tmp_path)
    assert torch.equal(found.read([("model", "a")])["model", "a"], whole) and found.damage() == []
    for begin in range(0, whole.numel(), 3):
        boxes = boxes_of_range(shape, begin, min(begin + 4, whole.numel()))
        part = found.read([("model", "a")], {("model", "a"): boxes})["model", "a"]
        assert torch.equal(part.flat(), whole.reshape(-1)[begin : begin + 4])
    plain = {"model": {"a": torch.zeros(shape)}}
    dcp.load(plain, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(plain["model"]["a"], whole)


def test_a_box_that_several_workers_have_is_written_once(tmp_path: Path) -> None:
    whole = torch.randn(4, 100)
    rows = [{("model", "a"): part_of_range(whole[row], whole.shape, 100 * row)} for row in (0, 1, 1, 2, 3, 0)]
    write(tmp_path, [*rows, {("model", "a"): part_of_range(whole[0, :0], whole.shape, 0)}])
    assert files(tmp_path)[1:] == [f"step-3-a-worker-{n}_0.distcp" for n in (0, 1, 3, 4)]
    assert torch.equal(SavedFolder(tmp_path).read([("model", "a")])["model", "a"], whole)


def test_a_worker_reads_the_files_that_have_its_part(tmp_path: Path) -> None:
    whole = torch.randn(4, 5)
    write(tmp_path, [{("model", "a"): part_of_range(whole[row], whole.shape, 5 * row)} for row in range(4)])
    (tmp_path / "step-3-a-worker-0_0.distcp").unlink()
    found = SavedFolder(tmp_path)
    boxes = boxes_of_range((4, 5), 5, 15)
    assert torch.equal(found.read([("model", "a")], {("model", "a"): boxes})["model", "a"].values[0], whole[1:3])
    with pytest.raises(CheckpointError, match=r"worker-0_0\.distcp"):
        found.read([("model", "a")])


@pytest.mark.parametrize("rows", [(0, 1, 3), (0,), ()])
def test_parts_that_are_not_the_whole_tensor_are_no_checkpoint(tmp_path: Path, rows: tuple[int, ...]) -> None:
    whole = torch.randn(4, 5)
    empty = {("model", "a"): part_of_range(whole[0, :0], whole.shape, 0)}
    shares = [{("model", "a"): part_of_range(whole[row], whole.shape, 5 * row)} for row in rows]
    with pytest.raises(CheckpointError, match=rf"model\.a.*{5 * len(rows)} of its 20 elements"):
        write(tmp_path, [*shares, empty])
    overlapping = [part_of_range(whole[:3].reshape(-1), (4, 5), 0), part_of_range(whole[2:].reshape(-1), (4, 5), 10)]
    with pytest.raises(CheckpointError, match=r"model\.a.*overlap"):
        write(tmp_path, [{("model", "a"): part} for part in overlapping])


def test_metadata_that_describe_a_part_of_a_tensor_are_refused(tmp_path: Path) -> None:
    """torch leaves the other elements as they are in memory."""
    whole = torch.randn(4, 5)
    write(tmp_path, [{("model", "a"): part_of_range(whole[row], whole.shape, 5 * row)} for row in range(4)])
    described = pickle.loads((tmp_path / ".metadata").read_bytes())
    described.state_dict_metadata["model.a"].chunks.pop()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(CheckpointError, match=r"model\.a .*15 of its 20"):
        SavedFolder(tmp_path).read([("model", "a")])


class Sharded(Tensor):
    """A tensor with the protocol by which torch Distributed Checkpoint asks a DTensor for its part."""

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 5]))]

    def to_local(self) -> Tensor:
        return self.as_subclass(Tensor)[2:]


def test_a_dtensor_is_a_part(tmp_path: Path) -> None:
    whole = torch.randn(4, 5)
    write(
        tmp_path,
        [{("model", "a"): part_of_range(whole[:2].reshape(-1), (4, 5), 0)}, weights(a=whole.as_subclass(Sharded))],
    )
    assert torch.equal(SavedFolder(tmp_path).read([("model", "a")])["model", "a"], whole)
