"""Sharded optimizer state (zero=1) survives its workers: nothing is lost, and the result has the same bits."""

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from lp_pipe.data_parallel.workers import mirror_distance
from tests.data_parallel.loops import SEED, batch, build, differences, plain_loop, train
from tests.data_parallel.test_failures import STEPS, WITHIN_S, assert_each_shard_once, dying


@pytest.mark.parametrize(
    ("on_failure", "place", "deaths"),
    [
        ("shrink", "shard", {"replicas/1": 5}),
        ("restart", "shard", {"replicas/0": 4, "replicas/2": 8}),
        ("shrink", "exchange", {"replicas/0": 4, "replicas/1": 7, "replicas/3": 9}),
        ("restart", "exchange", {"replicas/1": 6}),
        ("restart", "end", {"replicas/1": 5, "replicas/3": 5}),  # no neighbours
    ],
)
def test_dead_workers_lose_no_shard(
    launched: Any, on_failure: str, place: str, deaths: dict[str, int], tmp_path: Path
) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 5, "workers": 4, "seed": SEED, "on_failure": on_failure}
    dp.add_replicas(program, dying, str(tmp_path), deaths, place, zero=1, **options)
    launched(program).wait(WITHIN_S)
    assert differences(tmp_path, *plain_loop(STEPS, 5)) == []
    if place != "exchange":  # else the dead worker has not noted its shards of the finished step
        assert_each_shard_once(tmp_path, 5)
    assert len(list(tmp_path.glob("rank*.pt"))) == (4 if on_failure == "restart" else 4 - len(deaths))


@pytest.mark.parametrize("on_failure", ["restart", "shrink"])
def test_a_shard_that_is_lost_with_its_mirror_comes_from_a_checkpoint(
    launched: Any, on_failure: str, tmp_path: Path
) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 4, "workers": 3, "seed": SEED, "on_failure": on_failure}
    deaths = {"replicas/0": 7, "replicas/1": 7}
    dp.add_replicas(program, dying, str(tmp_path), deaths, "end", zero=1, save_every=2, **options)
    launched(program).wait(WITHIN_S)
    assert differences(tmp_path, *plain_loop(STEPS, 4)) == []


@pytest.mark.parametrize("on_failure", ["restart", "shrink"])
def test_the_error_of_a_lost_shard_names_the_dead_workers(launched: Any, on_failure: str, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 4, "workers": 3, "seed": SEED, "on_failure": on_failure}
    dp.add_replicas(program, dying, str(tmp_path), {"replicas/0": 7, "replicas/1": 7}, "end", zero=1, **options)
    with pytest.raises(lp.NodeError, match=r"(?s)replicas/0, replicas/1.*save_every"):
        launched(program).wait(WITHIN_S)


def dying_in_save(replica: dp.Replica, folder: str) -> None:
    """Train; die in the middle of a checkpoint, once."""
    mark = Path(folder) / "died"
    take_part = replica.own_steps.state.save

    def save() -> None:
        if lp.context().name == "replicas/1" and replica.own_steps.state.step == 4 and not mark.exists():
            mark.touch()
            raise OSError("this worker dies")
        take_part()

    replica.own_steps.state.save = save  # type: ignore[method-assign]
    train(replica, folder, 6, save_every=2, zero=1)


def dying_behind_the_loop(replica: dp.Replica, folder: str) -> None:
    """Train; die where others gather the whole state, once."""
    mark = Path(folder) / "died"
    gather = replica.own_steps.optimizer_state

    def gathered(optimizer: Any) -> dict[str, Any]:
        if lp.context().name == "replicas/1" and not mark.exists():
            mark.touch()
            raise OSError("this worker dies")
        return gather(optimizer)

    replica.own_steps.optimizer_state = gathered  # type: ignore[method-assign]
    train(replica, folder, 6, zero=1)


@pytest.mark.parametrize("on_failure", ["restart", "shrink"])
@pytest.mark.parametrize("dies", [dying_in_save, dying_behind_the_loop])
def test_a_death_while_all_gather_or_save_is_no_loss(
    launched: Any, dies: Callable[..., None], on_failure: str, tmp_path: Path
) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, dies, str(tmp_path), replicas=4, workers=3, seed=SEED, on_failure=on_failure)
    launched(program, run_dir=tmp_path / "run").wait(WITHIN_S)
    assert differences(tmp_path, *plain_loop(6, 4)) == []
    if dies is dying_in_save:
        found = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
        assert found[-1] == "step-00000006" and "step-00000004" in found


def two_optimizers(replica: dp.Replica, folder: str, place: str, zeros: tuple[int, int]) -> None:
    """Train with an optimizer for each half of a model; die between their steps, once."""
    mark = Path(folder) / "died"
    model = build()
    halves = [model.enter, model.leave]
    optimizers = [
        replica.optimizer(torch.optim.Adam(half.parameters(), 0.01), model, zero=zero, bucket_bytes=100)
        for half, zero in zip(halves, zeros, strict=True)
    ]
    for step in replica.steps(6, model=model, first=optimizers[0], second=optimizers[1]):
        for shard in replica.shards(batch(step)):
            (F.cross_entropy(model(shard.input), shard.target) * shard.weight).backward()
        optimizers[0].step()
        if lp.context().name == "replicas/1" and step == 3 and place == "between" and not mark.exists():
            mark.touch()
            raise OSError("this worker dies")
        optimizers[1].step()
    torch.save(
        ({name: value.clone() for name, value in model.state_dict().items()}, optimizers[1].state_dict()),
        Path(folder) / f"rank{replica.rank}.pt",
    )


@pytest.mark.parametrize(
    ("backend", "zeros", "mirror_every"),
    [
        ("auto", (1, 1), 1),
        (dp.Servers(1), (1, 1), 1),
        pytest.param("auto", (0, 1), 2, marks=pytest.mark.slow),
    ],
)
def test_a_step_of_two_optimizers_is_undone_in_all_shards(
    launched: Any, backend: Any, zeros: tuple[int, int], mirror_every: int, tmp_path: Path
) -> None:
    for at in ("none", "between"):
        (tmp_path / at).mkdir()
        program = lp.Program("replicas")
        options = {"replicas": 4, "workers": 3, "seed": SEED, "on_failure": "shrink", "backend": backend}
        options["mirror_every"] = mirror_every
        dp.add_replicas(program, two_optimizers, str(tmp_path / at), at, zeros, **options)
        launched(program).wait(WITHIN_S)
    expected, found = (torch.load(tmp_path / at / "rank0.pt") for at in ("none", "between"))
    assert all(torch.equal(expected[0][name], found[0][name]) for name in expected[0])
    for index, values in expected[1]["state"].items():
        assert all(torch.equal(value, found[1]["state"][index][name]) for name, value in values.items())


def killed_at_some_moment(replica: dp.Replica, folder: str, name: str, after_s: float) -> None:
    """Train; be killed at a moment that has nothing to do with steps, once."""
    mark = Path(folder) / "died"
    if lp.context().name == name and not mark.exists():

        def kill() -> None:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        timer = threading.Timer(after_s, kill)
        timer.daemon = True
        timer.start()
    train(replica, folder, 60, zero=1, clip=None)


@pytest.mark.slow
@pytest.mark.parametrize("mirror_every", [1, 4])
@pytest.mark.parametrize("on_failure", ["restart", "shrink"])
def test_a_worker_that_is_killed_at_a_random_moment_loses_no_shard(
    launched: Any, on_failure: str, mirror_every: int, tmp_path: Path
) -> None:
    rng = random.Random()
    name, after_s = f"replicas/{rng.randrange(3)}", rng.uniform(0, 0.6)
    print(name, after_s)  # shown if the test fails
    program = lp.Program("replicas")
    options = {"replicas": 4, "workers": 3, "seed": SEED, "on_failure": on_failure, "mirror_every": mirror_every}
    dp.add_replicas(program, killed_at_some_moment, str(tmp_path), name, after_s, **options)
    launched(program, "process").wait(WITHIN_S)
    assert differences(tmp_path, *plain_loop(60, 4, clip=None)) == []


CASES_OF_COPIES = [
    ("shrink", "shard", {"replicas/1": 5}, None),
    pytest.param("restart", "exchange", {"replicas/0": 4, "replicas/2": 8}, None, marks=pytest.mark.slow),
    ("restart", "end", {"replicas/0": 7, "replicas/1": 7}, 2),  # neighbours: back to a checkpoint
    pytest.param("shrink", "end", {"replicas/1": 2, "replicas/2": 11}, 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("on_failure", "place", "deaths", "save_every"), CASES_OF_COPIES)
def test_with_mirrors_of_every_third_step_all_go_back_to_the_last_ones(
    launched: Any, on_failure: str, place: str, deaths: dict[str, int], save_every: int | None, tmp_path: Path
) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 4, "workers": 3, "seed": SEED, "on_failure": on_failure, "mirror_every": 3}
    dp.add_replicas(program, dying, str(tmp_path), deaths, place, zero=1, save_every=save_every, **options)
    launched(program).wait(WITHIN_S)
    assert differences(tmp_path, *plain_loop(STEPS, 4)) == []
    if deaths == {"replicas/1": 5}:
        found = [int(line.split()[0]) for file in tmp_path.glob("*.shards") for line in file.open()]
        shards = [len(batch(step)[0].chunk(4)) for step in range(STEPS)]
        assert [found.count(step) for step in (2, 3, 5)] == [shards[2], 2 * shards[3], shards[5]]


def making_an_optimizer_late(replica: dp.Replica) -> None:
    model = build()
    for _ in replica.steps(2):
        replica.optimizer(torch.optim.Adam(model.parameters()), model, zero=1)


def test_an_optimizer_whose_shards_would_have_no_copies_is_refused_by_name(launched: Any) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, making_an_optimizer_late, replicas=2, on_failure="shrink", mirror_every=2)
    with pytest.raises(lp.NodeError, match="mirror_every=2") as failed:
        launched(program).wait(WITHIN_S)
    assert failed.value.type_name == "NotSupported"


def test_a_mirror_is_on_another_host_where_there_is_one() -> None:
    for hosts, distance in (("aaa", 1), ("ab", 1), ("aabb", 2), ("aaabbb", 3), ("abc", 1), ("aabbcc", 2)):
        assert mirror_distance(hosts) == distance, hosts
    assert mirror_distance("aaab") in (1, 2, 3)  # one of three has its mirror beside it in any case
