"""Replicas whose gradients servers sum train to the bits of the loop in one process."""

from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from tests.data_parallel.loops import SEED, differences, plain_loop, train

STEPS = 8
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
