"""Replicated training is equal, to the bit, to the loop in one process, for every number of workers."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from tests.data_parallel.loops import SEED, batch, build, differences, plain_loop, train

STEPS = 8


@pytest.mark.parametrize(
    ("replicas", "workers", "microbatches"), [(4, 1, 1), (4, 2, 2), (4, 3, 1), (4, 4, 2), (3, 2, 1)]
)
def test_threads_train_as_one_process(replicas: int, workers: int, microbatches: int, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, train, str(tmp_path), STEPS, microbatches, replicas=replicas, workers=workers, seed=SEED)
    lp.launch(program, mode="thread", run_dir=tmp_path / "run").wait(timeout=60)
    assert differences(tmp_path, *plain_loop(STEPS, replicas, microbatches)) == []
    assert len(list(tmp_path.glob("rank*.pt"))) == workers


@pytest.mark.parametrize(
    ("mode", "backend", "workers"), [("thread", "direct", 3), ("process", "shm", 2), ("process", "direct", 4)]
)
def test_backends_train_as_one_process(launched: Any, mode: str, backend: str, workers: int, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 4, "workers": workers, "seed": SEED, "backend": backend}
    dp.add_replicas(program, train, str(tmp_path), STEPS, **options)
    launched(program, mode).wait(60)
    assert differences(tmp_path, *plain_loop(STEPS, 4)) == []


def test_the_death_of_a_worker_ends_the_program_by_default(launched: Any) -> None:
    def dying(replica: dp.Replica) -> None:
        replica.barrier()
        if replica.rank == 1:
            raise OSError("this worker dies")
        replica.barrier()

    program = lp.Program("replicas")
    dp.add_replicas(program, dying, replicas=3)
    with pytest.raises(lp.NodeError) as failed:
        launched(program).wait(60)
    assert (failed.value.index, failed.value.type_name) == (1, "OSError")


@pytest.mark.parametrize(("workers", "microbatches", "clip"), [(4, 2, None), (3, 1, None), (2, 1, 0.5), (1, 1, None)])
def test_sharded_optimizer_state_updates_to_the_same_bits(
    workers: int, microbatches: int, clip: float | None, tmp_path: Path
) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 4, "workers": workers, "seed": SEED, "zero": 1, "clip": clip}
    dp.add_replicas(program, train, str(tmp_path), STEPS, microbatches, **options)
    lp.launch(program, mode="thread", run_dir=tmp_path / "run").wait(timeout=60)
    assert differences(tmp_path, *plain_loop(STEPS, 4, microbatches, clip)) == []


def test_sharded_optimizer_state_has_the_same_bits_also_after_a_restart(launched: Any, tmp_path: Path) -> None:
    for workers, steps in [(3, 5), (2, STEPS)]:
        program = lp.Program("replicas")
        options = {"replicas": 4, "workers": workers, "seed": SEED, "zero": 1, "save_every": 5}
        dp.add_replicas(program, train, str(tmp_path), steps, **options)
        launched(program, run_dir=tmp_path / "run").wait(60)
        assert differences(tmp_path, *plain_loop(steps, 4)) == []
        for file in tmp_path.glob("rank*.pt"):
            file.unlink()


def asking(replicas: dp.ReplicasClient, folder: str) -> None:
    torch.save((replicas.state_dict(), replicas.fingerprint()), Path(folder) / "asked.pt")


def training_until_asked(replica: dp.Replica, folder: str) -> None:
    model = build()
    optimizer = replica.optimizer(torch.optim.Adam(model.parameters(), 0.01), model, zero=1)
    for step in replica.steps(1000, model=model, optimizer=optimizer):
        for shard in replica.shards(batch(step)):
            (model(shard.input).sum() * shard.weight).backward()
        optimizer.step()
        if replica.all_reduce(torch.tensor(float(Path(folder, "asked.pt").exists()))).item() == replica.world_size:
            return


def test_a_client_gets_the_whole_of_sharded_state_between_two_steps(tmp_path: Path) -> None:
    program = lp.Program("replicas")
    handle = dp.add_replicas(program, training_until_asked, str(tmp_path), replicas=2, seed=SEED)
    program.add_node(lp.PyNode(asking, handle, str(tmp_path)), label="asker")
    lp.launch(program, mode="thread", run_dir=tmp_path / "run").wait(timeout=60)
    state, _ = torch.load(tmp_path / "asked.pt", weights_only=False)
    moments = {index: values["exp_avg"].shape for index, values in state["optimizer"]["state"].items()}
    shapes = [parameter.shape for parameter in build().parameters()]
    assert moments and all(shapes[index] == shape for index, shape in moments.items())


def training_until_asked_behind_the_loop(replica: dp.Replica, folder: str, zero: int) -> None:
    train(replica, folder, STEPS, zero=zero)
    while replica.rank == 0 and replica.own_steps._state_requests.empty():
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("mode", "zero", "options"),
    [
        ("thread", 1, {}),
        pytest.param("thread", 1, {"on_failure": "shrink"}, marks=pytest.mark.slow),
        pytest.param("process", 2, {}, marks=pytest.mark.slow),
        pytest.param("process", 3, {}, marks=pytest.mark.slow),
        pytest.param("process", 3, {"workers": 1}, marks=pytest.mark.slow),
    ],
)
def test_a_client_gets_sharded_state_after_the_last_step(
    launched: Any, mode: str, zero: int, options: dict[str, Any], tmp_path: Path
) -> None:
    program = lp.Program("replicas")
    asked = {"replicas": 3, "seed": SEED, "zero": zero, **options}
    handle = dp.add_replicas(program, training_until_asked_behind_the_loop, str(tmp_path), **asked)
    run = launched(program, mode)
    client = run.client(handle)
    while not (tmp_path / "rank0.pt").exists():  # the loop is over
        time.sleep(0.01)
    state = client.state_dict()
    run.wait(60)
    for file in tmp_path.glob("rank*.pt"):
        torch.save((state["model"], state["optimizer"]), file)
    assert differences(tmp_path, *plain_loop(STEPS, 3)) == []
