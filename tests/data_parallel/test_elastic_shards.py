"""Sharded optimizer state (zero=1) survives its workers: nothing is lost, and the result has the same bits."""

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from tests.data_parallel.loops import SEED, differences, plain_loop, train
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
@pytest.mark.parametrize("on_failure", ["restart", "shrink"])
def test_a_worker_that_is_killed_at_a_random_moment_loses_no_shard(
    launched: Any, on_failure: str, tmp_path: Path
) -> None:
    rng = random.Random()
    name, after_s = f"replicas/{rng.randrange(3)}", rng.uniform(0, 0.6)
    print(name, after_s)  # shown if the test fails
    program = lp.Program("replicas")
    options = {"replicas": 4, "workers": 3, "seed": SEED, "on_failure": on_failure}
    dp.add_replicas(program, killed_at_some_moment, str(tmp_path), name, after_s, **options)
    launched(program, "process").wait(WITHIN_S)
    assert differences(tmp_path, *plain_loop(60, 4, clip=None)) == []
