"""With mode="async" servers apply each worker's gradient once, as it comes, and all end with the same parameters."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from lp_pipe.data_parallel.async_parameters import SavedWorkers
from lp_pipe.errors import CheckpointError
from lp_pipe.testing.faults import kill
from tests.data_parallel.test_servers import learn_digits
from tests.waiting import until

STEPS = 6
WITHIN_S = 60


def train(replica: dp.Replica, folder: str, optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
    """Train a model whose gradients do not depend on its parameters; the order of updates does not matter then."""
    model = nn.Linear(3, 5, bias=False)
    nn.init.ones_(model.weight)
    optimizer = replica.optimizer(optimizer_class(model.parameters(), lr=1.0), model)
    ones = torch.ones(replica.num_replicas, 3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0 if step >= 3 else 1.0)
    for step in replica.steps(STEPS, model=model, optimizer=optimizer):
        before = model.weight.detach().clone()
        for x, _, _ in replica.shards((ones, ones), loss_weight="one"):
            (model(x).sum() * 2**replica.rank).backward()
        assert optimizer.step()
        # Its own gradient has been applied, at least.
        assert bool((model.weight <= before - 2**replica.rank * (2 if step >= 3 else 1)).all())
        scheduler.step()
    torch.save(model.state_dict(), Path(folder) / f"{replica.rank}.pt")


@pytest.mark.parametrize(("workers", "servers"), [(4, 1), (3, 2)])
def test_each_gradient_is_applied_once(launched: Any, workers: int, servers: int, tmp_path: Path) -> None:
    program = lp.Program("async")
    options = {"replicas": workers, "backend": dp.Servers(servers), "mode": "async"}
    dp.add_replicas(program, train, str(tmp_path), **options)
    launched(program, run_dir=tmp_path / "run").wait(WITHIN_S)
    expected = 1.0 - sum(2**rank * (3 * 1.0 + 3 * 2.0) for rank in range(workers))
    for rank in range(workers):
        found = torch.load(tmp_path / f"{rank}.pt")["weight"]
        assert torch.equal(found, torch.full((5, 3), expected)), rank
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    staleness = [row["values"]["staleness"] for row in rows if "staleness" in row["values"]]
    assert len(staleness) == workers * STEPS and 0 <= min(staleness) <= max(staleness) < STEPS * workers


def test_an_optimizer_that_is_not_elementwise_is_refused(launched: Any, tmp_path: Path) -> None:
    program = lp.Program("async")
    options = {"replicas": 2, "backend": dp.Servers(1), "mode": "async"}
    dp.add_replicas(program, train, str(tmp_path), torch.optim.LBFGS, **options)
    with pytest.raises(lp.NodeError) as failed:
        launched(program).wait(WITHIN_S)
    assert failed.value.type_name == "NotSupported"


def train_in_danger(
    replica: dp.Replica, folder: str, steps: int, deaths: dict[int, tuple[int, str]], save_every: int | None = None
) -> None:
    """Train a model whose final parameters are minus the sum of all gradients; die in some steps, once each."""
    model = nn.Linear(3, 5, bias=False)
    model.register_buffer("seen", torch.zeros(1))
    nn.init.zeros_(model.weight)
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, steps // 2, 0.5)
    log = Path(folder) / f"steps{replica.rank}"

    def die_at(step: int, here: str) -> None:
        mark = Path(folder) / f"died{replica.rank}-{step}"
        if deaths.get(replica.rank) == (step, here) and not mark.exists():
            mark.touch()
            raise OSError("this worker dies")

    for step in replica.steps(steps, save_every, model=model, optimizer=optimizer, scheduler=scheduler):
        with log.open("a") as file:
            file.write(f"{step}\n")
        for x, _, _ in replica.shards(
            (torch.ones(replica.num_replicas, 3), torch.ones(replica.num_replicas)), 1, "one"
        ):
            (model(x).sum() * 2**replica.rank * (step + 1)).backward()
            time.sleep(0.005)
        model.seen += 1
        die_at(step, "before")
        assert optimizer.step()
        die_at(step, "after")
        scheduler.step()
    assert int(model.seen) == steps
    torch.save(model.state_dict(), Path(folder) / f"{replica.rank}.pt")


def die_once_all_have_returned(replica: dp.Replica, folder: str, killed: list[str]) -> None:
    mark = Path(folder) / f"died{replica.rank}"

    def die() -> None:
        mark.touch()
        raise OSError("this worker dies")

    if lp.context().name in killed and not mark.exists():
        lp.context().exit_stack.callback(die)  # runs after servers have been told that `train` has returned
    train_in_danger(replica, folder, 4, {})


def test_a_worker_that_dies_after_the_training_needs_no_others(launched: Any, tmp_path: Path) -> None:
    program = lp.Program("async")
    options = {"replicas": 3, "backend": dp.Servers(2), "mode": "async", "on_failure": "restart"}
    dp.add_replicas(program, die_once_all_have_returned, str(tmp_path), ["replicas/0", "replicas/2"], **options)
    launched(program).wait(WITHIN_S)
    assert_sum_of_all(tmp_path, 3, 4)
    assert (tmp_path / "died0").exists() and (tmp_path / "died2").exists()


def assert_sum_of_all(folder: Path, workers: int, steps: int) -> None:
    rates = [(step + 1) * 0.5 ** (step // (steps // 2)) for step in range(steps)]
    expected = -sum(2**rank * rate for rank in range(workers) for rate in rates)
    for rank in range(workers):
        found = torch.load(folder / f"{rank}.pt")["weight"]
        assert torch.equal(found, torch.full((5, 3), expected)), (rank, expected, found)


@pytest.mark.parametrize("mirror_every", [1, 3])
def test_a_dead_worker_goes_on_with_its_own_steps(launched: Any, mirror_every: int, tmp_path: Path) -> None:
    program = lp.Program("async")
    deaths = {0: (3, "before"), 1: (0, "after"), 2: (5, "after")}
    options = {"replicas": 3, "backend": dp.Servers(2), "mode": "async", "mirror_every": mirror_every}
    dp.add_replicas(program, train_in_danger, str(tmp_path), 8, deaths, on_failure="restart", **options)
    launched(program).wait(WITHIN_S)
    assert_sum_of_all(tmp_path, 3, 8)
    # The next step of a worker is the first that servers have not heard of: at most one is computed again.
    assert [int(line) for line in (tmp_path / "steps0").open()] == [0, 1, 2, 3, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("compression", [dp.Fp16(), dp.OneBit(), dp.TopK(1.0)])
def test_compressed_gradients_are_applied_once(launched: Any, compression: Any, tmp_path: Path) -> None:
    """All gradients are alike, so that each form has them whole; what TopK leaves out is tested by learning."""
    program = lp.Program("async")
    options = {"replicas": 2, "backend": dp.Servers(2, compression=compression), "mode": "async"}
    dp.add_replicas(program, train_in_danger, str(tmp_path), 6, {1: (3, "after")}, on_failure="restart", **options)
    launched(program).wait(WITHIN_S)
    assert_sum_of_all(tmp_path, 2, 6)


def test_a_checkpoint_has_each_gradient_once(launched: Any, tmp_path: Path) -> None:
    for deaths, servers in (({1: (5, "after")}, 2), ({0: (6, "after")}, 3), ({}, 1)):
        program = lp.Program("async")
        options = {"replicas": 3, "backend": dp.Servers(servers), "mode": "async"}
        dp.add_replicas(program, train_in_danger, str(tmp_path), 8, deaths, 2, **options)
        run = launched(program, run_dir=tmp_path / "run")
        if deaths:
            with pytest.raises(lp.NodeError):
                run.wait(WITHIN_S)
        else:
            run.wait(WITHIN_S)
    assert_sum_of_all(tmp_path, 3, 8)
    assert len([*(tmp_path / "steps0").open()]) < 3 * 8


def train_by_replica(replica: dp.Replica, folder: str, steps: int, dies_at: int | None = None) -> None:
    """Train a model whose final parameters are minus the sum of all replicas' gradients; odd ranks are slow."""
    model = nn.Linear(3, 5, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    ones = torch.ones(replica.num_replicas, 3)
    for step in replica.steps(steps, 2, model=model, optimizer=optimizer, scheduler=scheduler):
        for shard in replica.shards((ones, ones), 1, "one"):
            (model(shard.input).sum() * 2**shard.replica).backward()
            time.sleep(0.004 * (1 + 3 * (replica.rank % 2)))
        optimizer.step()
        scheduler.step()
        if replica.rank == 0 and step == dies_at:
            raise OSError("this worker dies")
    torch.save(model.state_dict(), Path(folder) / f"{replica.rank}.pt")


def test_another_number_of_workers_goes_on_from_a_checkpoint(launched: Any, tmp_path: Path) -> None:
    for workers, dies_at in ((4, 5), (2, 8), (3, None)):
        program = lp.Program("async")
        options = {"replicas": 4, "workers": workers, "backend": dp.Servers(2), "mode": "async"}
        dp.add_replicas(program, train_by_replica, str(tmp_path), 12, dies_at, **options)
        run = launched(program, run_dir=tmp_path / "run")
        if dies_at is None:
            run.wait(WITHIN_S)
            continue
        with pytest.raises(lp.NodeError):
            run.wait(WITHIN_S)
    expected = -sum(2**replica * 0.5 ** (step // 4) for replica in range(4) for step in range(12))
    for rank in range(3):
        found = torch.load(tmp_path / f"{rank}.pt")["weight"]
        assert torch.equal(found, torch.full((5, 3), expected)), (rank, expected, found)


@pytest.mark.parametrize(
    ("applied", "last_steps"),
    [
        ([{0: 3, 1: 6}], [{0: 2, 1: 4}]),  # two gradients of rank 1 in a step
        ([{0: 3, 1: 6}], []),  # a checkpoint of an older version
        ([{0: 3, 1: 6}, {0: 3, 1: 5}], [{0: 2, 1: 5}, {0: 2, 1: 4}]),  # only one of two optimizers has made step 5
    ],
)
def test_a_part_of_a_step_needs_as_many_workers_as_before(applied: Any, last_steps: Any) -> None:
    saved = SavedWorkers(replicas=4)
    places = {0: (3, (3,) * len(applied), {}), 1: (5, (5,) * len(applied), {})}
    saved.load_state_dict({"applied": applied, "places": places} | ({"last_steps": last_steps} if last_steps else {}))
    with pytest.raises(CheckpointError, match=r"rank 1.*workers=2"):
        saved.dealt(4)
    saved.applied = [dict(counts) | {1: 5} for counts in applied]
    found = saved.dealt(3)
    assert [place.step for place in found.values()] == [3, 5, 5]
    assert [place.first_steps for place in found.values()] == [{0: 3, 1: 3}, {2: 5}, {3: 5}]


KILLS = [["replicas-servers"], ["replicas"], ["replicas-servers", "replicas"]]


@pytest.mark.parametrize(
    ("seed", "killed"),
    [(2, KILLS[2]), *(pytest.param(seed, KILLS[seed % 3], marks=pytest.mark.slow) for seed in range(3, 24))],
)
def test_killed_servers_and_workers_lose_no_gradient(
    launched: Any, seed: int, killed: list[str], tmp_path: Path
) -> None:
    draw = random.Random(seed)
    program = lp.Program("async")
    servers, mirror_every = draw.choice([2, 3]), draw.choice([1, 1, 4])
    save_every = draw.choice([None, 3])
    options = {"replicas": 3, "backend": dp.Servers(servers), "mode": "async", "mirror_every": mirror_every}
    dp.add_replicas(program, train_in_danger, str(tmp_path), 30, {}, save_every, on_failure="restart", **options)
    run = launched(program, "process")
    until(lambda: (tmp_path / "steps0").exists(), WITHIN_S)
    time.sleep(draw.random() * 0.4)
    for label in killed:
        kill(run, (label, draw.randrange(len(program.groups[label]))))
    run.wait(WITHIN_S)
    assert_sum_of_all(tmp_path, 3, 30)


@pytest.mark.slow
@pytest.mark.parametrize("compression", [dp.TopK(0.01), dp.OneBit(), dp.Fp16()])
def test_compressed_asynchronous_gradients_learn_as_well(launched: Any, compression: Any) -> None:
    pytest.importorskip("sklearn")
    found: list[float] = []
    program = lp.Program("digits")
    servers = dp.Servers(2, compression=compression)
    dp.add_replicas(program, learn_digits, found, replicas=2, backend=servers, mode="async")
    launched(program).wait(WITHIN_S)
    assert found[0] > 0.94, found
