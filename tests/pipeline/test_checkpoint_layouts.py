"""A checkpoint has no world size: what stages and replicas of one layout have saved, those of any other load."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lp_pipe.cli.main import main
from lp_pipe.pipeline.saving.dcp_reading import SavedFolder
from lp_pipe.training.share_file import EntryKey
from tests.pipeline.plain_loop import launched, model_with_everything, random_batches

BATCHES = random_batches([12, 12, 12])
SAVED = {
    "pp 2, dp 2, zero 1": {"stages": 2, "replicas": 2, "zero": 1},
    "dp 4, zero 3": {"stages": 1, "replicas": 4, "zero": 3},
    "pp 3": {"stages": 3},
}
LOADED = {
    "1 process": {"stages": 1},
    "pp 4": {"stages": 4},
    "dp 3, zero 2": {"stages": 1, "replicas": 3, "zero": 2},
    "dp 2, zero 3": {"stages": 1, "replicas": 2, "zero": 3},
    "pp 2, dp 3 and 1, zero 1": {"stages": 2, "replicas": (3, 1), "zero": 1},
}


def tensors(folder: Path) -> dict[EntryKey, Tensor]:
    found = SavedFolder(folder)
    entries = found.read(key for key in found.keys if key[0] in ("model", "optimizer"))
    return {key: value for key, value in entries.items() if isinstance(value, Tensor)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, options in SAVED.items():
        folders[name] = tmp_path_factory.mktemp("saved")
        with launched("thread", model_with_everything(), BATCHES, microbatches=4, **options) as pipeline:
            pipeline.step()
            pipeline.step()
            pipeline.save(folders[name])
    return folders


@pytest.mark.parametrize("loaded", LOADED)
def test_any_layout_loads_what_another_has_saved(saved: dict[str, Path], loaded: str, tmp_path: Path) -> None:
    with launched("thread", model_with_everything(), BATCHES, microbatches=4, **LOADED[loaded]) as pipeline:
        for name, folder in saved.items():
            pipeline.load(folder)
            pipeline.save(tmp_path / name)
            expected, found = tensors(folder), tensors(tmp_path / name)
            assert found.keys() == expected.keys() and any(key[-1] == "exp_avg" for key in found), name
            wrong = [key for key, value in expected.items() if not torch.equal(value, found[key])]
            assert wrong == [], name
            assert SavedFolder(tmp_path / name).manifest().step == 2


def test_torch_and_the_command_line_read_every_layout(
    saved: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in saved.values():
        expected = tensors(folder)
        plain: dict[str, Any] = {".".join(key): torch.zeros_like(value) for key, value in expected.items()}
        dcp.load(plain, checkpoint_id=folder, no_dist=True)
        assert all(torch.equal(plain[".".join(key)], value) for key, value in expected.items())
        assert main(["checkpoint", "verify", str(folder)]) == 0
        assert main(["checkpoint", "export", str(folder), "-o", str(tmp_path / "whole.safetensors")]) == 0
    assert "changed" not in capsys.readouterr().out.replace("unchanged", "")


def test_the_replicas_write_a_share_each(saved: dict[str, Path]) -> None:
    counts = [len(list(folder.glob("*.distcp"))) for folder in saved.values()]
    assert counts == [4, 4, 3]
