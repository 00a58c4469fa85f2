"""A checkpoint has no number of workers: what some workers have saved, any others load, and pipelines do."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import lp_pipe as lp
import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp
from lp_pipe.checkpoint import Checkpoints, checkpoints_in
from lp_pipe.cli.main import main
from lp_pipe.errors import CheckpointError
from lp_pipe.training.share_file import Share
from tests.data_parallel.loops import SEED, build, differences, plain_loop, train

WITHIN_S = 60


def trained(launched: Any, folder: Path, workers: int, steps: int, zero: int, save_every: int = 2) -> None:
    """Train up to that step, from the newest checkpoint on, and compare with the plain loop."""
    for file in folder.glob("rank*.pt"):
        file.unlink()
    program = lp.Program("replicas")
    dp.add_replicas(
        program, train, str(folder), steps, replicas=4, workers=workers, seed=SEED, zero=zero, save_every=save_every
    )
    launched(program, run_dir=folder / "run").wait(WITHIN_S)
    assert differences(folder, *plain_loop(steps, 4)) == []
    assert len(list(folder.glob("rank*.pt"))) == workers


def newest(folder: Path) -> Path:
    return checkpoints_in(folder / "run" / "checkpoints")[-1]


def test_any_number_of_workers_loads_what_others_have_saved(launched: Any, tmp_path: Path) -> None:
    shares = []
    for steps, (workers, zero) in zip((4, 6, 8, 10), [(3, 1), (2, 1), (1, 0), (4, 1)], strict=True):
        trained(launched, tmp_path, workers, steps, zero)
        shares.append(len(list((newest(tmp_path) / "model").glob("*.distcp"))))
    assert shares == [3, 2, 1, 4]


def test_torch_and_the_command_line_read_what_workers_have_saved(
    launched: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(launched, tmp_path, 3, 4, 1)
    model, optimizer = plain_loop(4, 4)
    found = {"model": build().state_dict(), "optimizer": {"enter.weight": {"exp_avg": torch.zeros(8, 6)}}}
    dcp.load(found, checkpoint_id=newest(tmp_path) / "model", no_dist=True)
    assert all(torch.equal(found["model"][name], value) for name, value in model.state_dict().items())
    averages = optimizer.state[model.enter.weight]["exp_avg"]
    assert torch.equal(found["optimizer"]["enter.weight"]["exp_avg"], averages)
    assert main(["checkpoint", "verify", str(tmp_path / "run")]) == 0
    assert main(["checkpoint", "export", str(tmp_path / "run"), "-o", str(tmp_path / "m.safetensors")]) == 0
    assert f"{len(model.state_dict())} tensors" in capsys.readouterr().out


def layers() -> nn.Sequential:
    with pp.layer_rng(SEED, 0):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.01)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def train_layers(replica: dp.Replica, steps: int) -> None:
    model = layers()
    optimizer = replica.optimizer(adam(model.parameters()), model, zero=1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in replica.steps(steps, 2, model=model, scheduler=scheduler):
        for shard in replica.shards(batch(step)):
            (nn.functional.cross_entropy(model(shard.input), shard.target) * shard.weight).backward()
        optimizer.step()
        scheduler.step()


def test_a_pipeline_goes_on_from_what_replicas_have_saved(launched: Any, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, train_layers, 2, replicas=2)
    launched(program, run_dir=tmp_path / "run").wait(WITHIN_S)
    fingerprints = []
    for folder in (None, newest(tmp_path) / "model"):
        program = lp.Program("pipeline")
        model = pp.Model(
            layers(),
            nn.functional.cross_entropy,
            adam,
            lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        )
        pipeline = pp.add_pipeline(program, model, stages=2, microbatches=2)
        launched(program)
        client = pipeline.dereference()
        for step in range(4):
            if folder is not None and step < 2:
                client.load(folder)
                continue
            client.step(batch(step))
        fingerprints.append(client.fingerprint())
    assert fingerprints[0] == fingerprints[1]


def test_a_checkpoint_of_before_november_2026_is_loaded(launched: Any, tmp_path: Path) -> None:
    model, optimizer = plain_loop(4, 4)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.Adam(model.parameters(), 0.01), 3, 0.9)
    scheduler.last_epoch = 4
    Checkpoints(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler}, tmp_path / "run" / "checkpoints"
    ).save(4)
    for workers, zero in [(3, 1), (2, 0)]:
        trained(launched, tmp_path, workers, 6, zero, save_every=100)


class Counting(torch.optim.SGD):
    """An optimizer with state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1
        super().step()


def test_state_of_no_parameter_is_saved_and_loaded(launched: Any, tmp_path: Path) -> None:
    counts: list[int] = []

    def count(replica: dp.Replica, steps: int) -> None:
        model = nn.Linear(2, 2)
        optimizer = replica.optimizer(Counting(model.parameters(), 0.1), model)
        for _ in replica.steps(steps, 1, model=model):
            optimizer.step()
        counts.append(optimizer.state["steps"])

    for steps in (2, 3):
        program = lp.Program("replicas")
        dp.add_replicas(program, count, steps, replicas=2)
        launched(program, run_dir=tmp_path / "run").wait(WITHIN_S)
    assert counts == [2, 2, 3, 3]


def test_the_error_of_a_worker_that_cannot_write_names_it(
    launched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Share.write

    def full(self: Share, folder: str, version: str, worker: int, *others: Any) -> Any:
        if worker == 2:
            raise OSError(28, "No space left on device", folder)
        return write(self, folder, version, worker, *others)

    monkeypatch.setattr(Share, "write", full)
    with pytest.raises(lp.NodeError, match=r"replicas/2 on .*No space left") as failed:
        trained(launched, tmp_path, 3, 4, 1)
    assert isinstance(failed.value, CheckpointError) or failed.value.type_name == "CheckpointError"
    assert checkpoints_in(tmp_path / "run" / "checkpoints") == []
    monkeypatch.undo()
    trained(launched, tmp_path, 3, 4, 1)


def dying_while_it_writes(replica: dp.Replica, folder: str, steps: int) -> None:
    """Be killed in the middle of the second checkpoint's write."""
    write = Share.write
    count = 0

    def cut_short(self: Share, folder: str, version: str, worker: int, *others: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2 and worker == 1:
            Path(folder, f"{version}-worker-{worker}_0.distcp").write_bytes(b"PK")
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, folder, version, worker, *others)

    Share.write = cut_short  # type: ignore[method-assign]  # in this process alone
    train(replica, folder, steps, save_every=2, zero=1)


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_write_leaves_the_checkpoint_before(launched: Any, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, dying_while_it_writes, str(tmp_path), 6, replicas=4, workers=2, seed=SEED)
    with pytest.raises(lp.NodeError) as failed:
        launched(program, "process", run_dir=tmp_path / "run").wait(WITHIN_S)
    assert failed.value.index == 1
    assert newest(tmp_path).name == "step-00000002"
    trained(launched, tmp_path, 3, 6, 1)
