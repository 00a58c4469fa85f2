"""A trained pipeline as a file that plain torch loads."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.saving import safetensors_file
from tests.checkpoint import disks
from tests.pipeline.plain_loop import D, adam, assert_same_state, launched, random_batches, squared_error

pytestmark = pytest.mark.usefixtures("no_leaks")

needs_disks = pytest.mark.skipif(bool(disks.why_not()), reason=disks.why_not() or "there are disks")
BATCHES = random_batches([6, 6])


def tied_model() -> pp.Model:
    first, norm, second = nn.Linear(D, D), nn.BatchNorm1d(3), nn.Linear(D, D)
    second.weight = first.weight
    return pp.Model([first, norm, second], squared_error, adam)


@pytest.mark.parametrize("stages", [1, 3])
def test_an_export_loads_into_the_plain_module(stages: int, tmp_path: Path) -> None:
    model, path = tied_model(), tmp_path / "model.safetensors"
    with launched("thread", model, BATCHES, stages=stages, microbatches=2) as pipeline:
        pipeline.export(path)
        list(pipeline.steps())
        pipeline.export(path)  # over the older one
        state = pipeline.state_dict()
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "2"}
    loaded = load_file(path)
    assert_same_state({name: loaded[name] for name in state}, state)
    plain = nn.Sequential(*tied_model().layers)
    plain.load_state_dict(loaded)
    assert torch.equal(plain[2].weight, state["0.weight"]) and plain[0].weight is plain[2].weight
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


class Counts(nn.Linear):
    def get_extra_state(self) -> object:
        return {"calls": 3}

    def set_extra_state(self, state: object) -> None:
        pass


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    with launched("thread", pp.Model([Counts(D, D)], squared_error, adam), stages=1) as pipeline:
        with pytest.raises(pp.PipelineError, match="there is no folder"):
            pipeline.export(tmp_path / "missing" / "model.safetensors")
        with pytest.raises(pp.PipelineError, match=r"0\._extra_state is a dict, .*tensors only"):
            pipeline.export(tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


@needs_disks
def test_a_full_disk_is_named_and_the_older_export_stays(tmp_path: Path) -> None:
    """Regression: it was an error of the safetensors package, and a traceback on the command line."""

    def body() -> None:
        disks.mount_small(tmp_path / "disk", "64k")
        path = tmp_path / "disk" / "model.safetensors"
        safetensors_file.write(path, {"a": torch.ones(9)}, 0)
        with pytest.raises(pp.PipelineError, match=r"model.safetensors'\): .* cannot be written: .*No space left"):
            safetensors_file.write(path, {"a": torch.ones(100_000)}, 1)
        assert torch.equal(load_file(path)["a"], torch.ones(9))
        assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]
        disks.make_read_only(tmp_path / "disk")
        with pytest.raises(pp.PipelineError, match=r"the file cannot be written: .*Read-only file system"):
            safetensors_file.write(path, {"a": torch.ones(9)}, 2)

    disks.with_own_mounts(body)


def test_an_export_is_on_the_disk_before_it_takes_the_place_of_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: after a power cut an empty file could be in the place of the older one."""
    path = tmp_path / "model.safetensors"
    path.write_text("the older one")
    seen = []

    def fsync(descriptor: int) -> None:
        seen.append((os.fstat(descriptor).st_size > 100, path.read_bytes()))

    monkeypatch.setattr(os, "fsync", fsync)
    safetensors_file.write(path, {"a": torch.ones(9)}, 0)
    assert seen == [(True, b"the older one")] and torch.equal(load_file(path)["a"], torch.ones(9))
