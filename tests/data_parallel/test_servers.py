"""Replicas whose gradients servers sum train to the bits of the loop in one process."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lp_pipe as lp
import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp
from lp_pipe.data_parallel import add, async_parameters
from lp_pipe.testing.faults import kill
from tests.data_parallel.loops import SEED, batch, build, configure, differences, plain_loop, train
from tests.data_parallel.test_failures import assert_each_shard_once, dying
from tests.waiting import until

STEPS = 8
SLOW_STEPS = 30
WITHIN_S = 60


@pytest.mark.parametrize(
    ("mode", "servers", "workers"),
    [
        ("thread", dp.Servers(1, partition_bytes=200), 2),
        ("thread", dp.Servers(3, colocated=False), 4),
        ("thread", dp.Servers(0), 3),
        ("process", dp.Servers(3, partition_bytes=200), 4),
    ],
)
def test_servers_train_as_one_process(
    launched: Any, mode: str, servers: dp.Servers, workers: int, tmp_path: Path
) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 4, "workers": workers, "seed": SEED, "backend": servers}
    dp.add_replicas(program, train, str(tmp_path), STEPS, **options)
    launched(program, mode).wait(WITHIN_S)
    assert differences(tmp_path, *plain_loop(STEPS, 4)) == []
    assert len(program.groups.get("replicas-servers", [])) == servers.count


def push_in_another_order(replica: dp.Replica) -> None:
    names = ["a", "b", "a", "c"]
    order = [names[(number + replica.rank) % 4] for number in range(4)]
    values = {"a": iter([1.0, 10.0]), "b": iter([100.0]), "c": iter([1000.0])}
    futures = [(name, replica.push_pull({"x": torch.full((3,), next(values[name]))}, name)) for name in order]
    found: dict[str, list[float]] = {}
    for name, future in futures:
        found.setdefault(name, []).append(float(future.result(20)["x"][0]))
    assert found == {"a": [3.0, 30.0], "b": [300.0], "c": [3000.0]}, found


def push_another_shape(replica: dp.Replica) -> None:
    replica.push_pull(torch.ones(3 + replica.rank), "x").result(20)


def test_pushed_tensors_belong_together_by_name(launched: Any) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, push_in_another_order, replicas=3, backend=dp.Servers(1))
    launched(program).wait(WITHIN_S)


@pytest.mark.parametrize(
    ("backend", "error"), [("auto", "NotSupported"), (dp.Servers(1, colocated=False), "CollectiveMismatch")]
)
def test_tensors_that_cannot_be_summed_are_an_error(launched: Any, backend: Any, error: str) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, push_another_shape, replicas=2, backend=backend)
    with pytest.raises(lp.NodeError) as failed:
        launched(program).wait(WITHIN_S)
    assert failed.value.type_name == error


def test_a_dead_worker_does_not_change_what_servers_sum(launched: Any, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 4, "workers": 3, "seed": SEED, "on_failure": "restart", "backend": dp.Servers(2)}
    dp.add_replicas(program, dying, str(tmp_path), {"replicas/0": 4, "replicas/2": 4}, "shard", **options)
    launched(program).wait(WITHIN_S)
    assert differences(tmp_path, *plain_loop(12, 4)) == []
    assert_each_shard_once(tmp_path, 4)


def train_slowly(replica: dp.Replica, folder: str) -> None:
    model = build()
    optimizer = replica.optimizer(torch.optim.Adam(model.parameters(), 0.01), model, clip_grad_norm=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    for step in replica.steps(SLOW_STEPS, model=model, optimizer=optimizer, scheduler=scheduler):
        configure(step, model)
        for shard in replica.shards(batch(step)):
            (F.cross_entropy(model(shard.input), shard.target) * shard.weight).backward()
            time.sleep(0.01)
        optimizer.step()
        scheduler.step()
    torch.save((model.state_dict(), optimizer.state_dict()), Path(folder) / f"rank{replica.rank}.pt")


KILLS = [["replicas-servers"], ["replicas"], ["replicas-servers", "replicas"]]


@pytest.mark.parametrize(
    ("seed", "killed"),
    [(0, KILLS[2]), *(pytest.param(seed, KILLS[seed % 3], marks=pytest.mark.slow) for seed in range(1, 21))],
)
def test_killed_servers_and_workers_do_not_change_what_is_learnt(
    launched: Any, seed: int, killed: list[str], tmp_path: Path
) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 3, "seed": SEED, "on_failure": "restart", "backend": dp.Servers(2, partition_bytes=200)}
    handle = dp.add_replicas(program, train_slowly, str(tmp_path), **options)
    run = launched(program, "process")
    client = run.client(handle)
    until(lambda: client.current_step() > 2, WITHIN_S)
    draw = random.Random(seed)
    time.sleep(draw.random() * 0.3)
    for label in killed:
        kill(run, (label, draw.randrange(len(program.groups[label]))))
    run.wait(WITHIN_S)
    assert differences(tmp_path, *plain_loop(SLOW_STEPS, 3)) == []


def learn_digits(replica: dp.Replica, found: list[float]) -> None:
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    chosen, held_out = order[:1437], order[1437:]
    with pp.layer_rng(0, 0):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.3), model)
    for step in replica.steps(400, model=model, optimizer=optimizer):
        own = chosen[torch.randint(0, len(chosen), (128,), generator=torch.Generator().manual_seed(step))]
        for inputs, targets, weight in replica.shards((x[own], y[own])):
            (F.cross_entropy(model(inputs), targets) * weight).backward()
        optimizer.step()
    if replica.rank == 0:
        found.append(float((model(x[held_out]).argmax(1) == y[held_out]).float().mean()))


@pytest.mark.slow
def test_compressed_gradients_learn_as_well(launched: Any) -> None:
    pytest.importorskip("sklearn")
    found: list[float] = []
    for compression in (None, dp.TopK(0.01), dp.OneBit()):
        program = lp.Program("digits")
        servers = dp.Servers(1, compression=compression)
        dp.add_replicas(program, learn_digits, found, replicas=2, backend=servers)
        launched(program).wait(WITHIN_S)
    plain, *compressed = found
    assert plain > 0.93 and min(compressed) >= plain - 0.01, found


def train_without_telling(replica: dp.Replica, folder: str) -> None:
    """Train, and do not tell the servers of the end, as if they had been told just before they were killed."""
    add.finish_servers = lambda _: None
    async_parameters.AsyncTraining.leave = lambda _: None  # type: ignore[method-assign]
    train(replica, folder, 3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_servers_that_are_killed_after_the_training_end(launched: Any, mode: str, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 2, "on_failure": "restart", "backend": dp.Servers(2), "mode": mode}
    dp.add_replicas(program, train_without_telling, str(tmp_path), **options)
    run = launched(program, "process")
    until(lambda: all(row["state"] == "finished" for row in run.status()["replicas"]), WITHIN_S)
    for number in range(2):
        kill(run, ("replicas-servers", number))
    run.wait(WITHIN_S)
