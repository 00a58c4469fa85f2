"""Sharded optimizer state (zero=1) survives its workers: nothing is lost, and the result has the same bits."""

from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from tests.data_parallel.loops import SEED, differences, plain_loop
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
