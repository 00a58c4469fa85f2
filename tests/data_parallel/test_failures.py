"""Training goes on when workers die: no step is lost, no sample comes twice, and the result has the same bits."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from tests.data_parallel.loops import SEED, batch, build, differences, plain_loop, train

STEPS = 12
WITHIN_S = 60


def dying(
    replica: dp.Replica,
    folder: str,
    deaths: dict[str, int],
    place: str,
    is_killed: bool = False,
    zero: int = 0,
    save_every: int | None = None,
    device: str = "cpu",
) -> None:
    """Train, but die in some step, once; note which shards of the finished steps were computed here."""
    name = lp.context().name
    mark = Path(folder) / f"{name.replace('/', '-')}.died"

    def die_at(step: int, here: str) -> None:
        if deaths.get(name) == step and place == here and not mark.exists():
            mark.touch()
            if is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("this worker dies")

    model = build().to(device)
    optimizer = replica.optimizer(
        torch.optim.Adam(model.parameters(), 0.01), model, zero=zero, clip_grad_norm=0.5, bucket_bytes=200
    )
    if place == "exchange":  # all have agreed that the step is finished, and not all have updated
        exchange = optimizer.exchange_updates
        optimizer.exchange_updates = lambda: (die_at(replica.own_steps.state.step, place), exchange())  # type: ignore[assignment, method-assign, func-returns-value]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    for step in replica.steps(STEPS, save_every, model=model, optimizer=optimizer, scheduler=scheduler):
        model.inner.requires_grad_(step % 4 != 2)
        replicas = []
        for shard in replica.shards(batch(step, device)):
            (F.cross_entropy(model(shard.input), shard.target) * shard.weight).backward()
            replicas.append(shard.replica)
            die_at(step, "shard")
        is_done = optimizer.step()
        scheduler.step()
        if is_done:
            with (Path(folder) / f"{name.replace('/', '-')}.shards").open("a") as file:
                file.writelines(f"{step} {number}\n" for number in replicas)
        die_at(step, "end")
    torch.save((model.state_dict(), optimizer.state_dict()), Path(folder) / f"rank{replica.rank}.pt")


def assert_each_shard_once(folder: Path, replicas: int) -> None:
    found = [tuple(map(int, line.split())) for file in folder.glob("*.shards") for line in file.open()]
    expected = [(step, r) for step in range(STEPS) for r, _ in enumerate(batch(step)[0].chunk(replicas))]
    assert sorted(found) == expected


@pytest.mark.parametrize("on_failure", ["shrink", "restart"])
@pytest.mark.parametrize(
    ("place", "deaths"),
    [
        ("shard", {"replicas/1": 5}),
        ("end", {"replicas/0": 7}),
        ("shard", {"replicas/0": 4, "replicas/2": 4}),
        ("end", {"replicas/0": 4, "replicas/2": 8}),
    ],
)
def test_dead_workers_do_not_change_what_is_learnt(
    launched: Any, place: str, deaths: dict[str, int], on_failure: str, tmp_path: Path
) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 4, "workers": 3, "seed": SEED, "on_failure": on_failure}
    dp.add_replicas(program, dying, str(tmp_path), deaths, place, **options)
    launched(program).wait(WITHIN_S)
    assert differences(tmp_path, *plain_loop(STEPS, 4)) == []
    assert_each_shard_once(tmp_path, 4)
    assert len(list(tmp_path.glob("rank*.pt"))) == (3 if on_failure == "restart" else 3 - len(deaths))


@pytest.mark.parametrize("on_failure", ["shrink", "restart"])
def test_a_killed_process_does_not_change_what_is_learnt(launched: Any, on_failure: str, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 3, "seed": SEED, "on_failure": on_failure}
    dp.add_replicas(program, dying, str(tmp_path), {"replicas/0": 6}, "shard", is_killed=True, **options)
    launched(program, "process").wait(WITHIN_S)
    assert differences(tmp_path, *plain_loop(STEPS, 3)) == []
    assert_each_shard_once(tmp_path, 3)


def die_once_all_have_returned(replica: dp.Replica, folder: str, is_killed: bool) -> None:
    mark = Path(folder) / "died"

    def die() -> None:
        mark.touch()
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("this worker dies")

    if lp.context().name == "replicas/0" and not mark.exists():
        lp.context().exit_stack.callback(die)  # runs after all have agreed that `train` has returned
    for step in replica.steps(3):
        replica.barrier()
        with (Path(folder) / f"step{step}").open("a") as file:
            file.write(f"{replica.world_size}\n")


@pytest.mark.parametrize(("mode", "on_failure"), [("thread", "restart"), ("process", "restart"), ("thread", "shrink")])
def test_a_worker_that_dies_after_the_training_needs_no_others(
    launched: Any, mode: str, on_failure: str, tmp_path: Path
) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 3, "workers": "2:3" if on_failure == "shrink" else 3, "on_failure": on_failure}
    dp.add_replicas(program, die_once_all_have_returned, str(tmp_path), mode == "process", **options)
    launched(program, mode).wait(WITHIN_S)
    assert (tmp_path / "died").exists()
    assert all((tmp_path / f"step{step}").read_text() == "3\n" * 3 for step in range(3))


def return_early(replica: dp.Replica) -> None:
    if lp.context().name == "replicas/0":
        return
    for _ in replica.steps(3):
        replica.barrier()


def test_a_worker_that_trains_in_no_step_is_an_error(launched: Any) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, return_early, replicas=2, on_failure="restart", max_restarts=0)
    with pytest.raises(lp.NodeError) as failed:
        launched(program).wait(WITHIN_S)
    assert failed.value.type_name in ("DataParallelError", "CollectiveMismatch")


def test_too_few_workers_end_the_program(launched: Any, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 3, "workers": "2:3", "on_failure": "shrink"}
    dp.add_replicas(program, dying, str(tmp_path), {"replicas/0": 2, "replicas/2": 5}, "shard", **options)
    with pytest.raises(lp.NodeError, match=r"(?s)needs 2.*replicas/0") as failed:
        launched(program).wait(WITHIN_S)
    assert (failed.value.label, failed.value.index) == ("replicas", 2)


def test_a_checkpoint_goes_on_with_other_workers(launched: Any, tmp_path: Path) -> None:
    for number, (workers, steps) in enumerate([(3, 5), (1, 8), (4, STEPS)]):
        program = lp.Program("replicas")
        options = {"replicas": 4, "workers": workers, "seed": SEED, "save_every": 1}
        dp.add_replicas(program, train, str(tmp_path), steps, **options)
        launched(program, run_dir=tmp_path / "run").wait(WITHIN_S)
        assert differences(tmp_path, *plain_loop(steps, 4)) == [], number
        for file in tmp_path.glob("rank*.pt"):
            file.unlink()


def reduce_after_the_step(replica: dp.Replica) -> None:
    model = build()
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for step in replica.steps(5, model=model, optimizer=optimizer):
        for shard in replica.shards(batch(step)):
            (F.cross_entropy(model(shard.input), shard.target) * shard.weight).backward()
        if optimizer.step() and step == 2 and lp.context().name == "replicas/1":
            raise OSError("this worker dies")
        replica.all_reduce(torch.ones(1))


def test_a_collective_without_a_meaning_in_a_finished_step_is_warned_of(
    launched: Any, caplog: pytest.LogCaptureFixture
) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, reduce_after_the_step, replicas=3, seed=SEED, on_failure="shrink")
    launched(program).wait(WITHIN_S)
    told = [record.getMessage() for record in caplog.records if "own values" in record.getMessage()]
    assert len(told) == 2 and {text.split(":")[0] for text in told} == {"replicas/0", "replicas/2"}
    assert all("step 2" in text and f"{Path(__file__).name}:" in text for text in told)
