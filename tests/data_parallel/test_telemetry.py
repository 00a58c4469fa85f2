"""Workers log their progress, a slow worker is reported, and the report of a hang names the rank that is missing."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from tests.waiting import until

WITHIN_S = 60
STEPS = 21


def slow_on_rank_1(replica: dp.Replica) -> None:
    model = nn.Linear(4, 4)
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.1), model, bucket_bytes=64)
    for _ in replica.steps(STEPS):
        for shard in replica.shards((torch.ones(6, 4), torch.ones(6, 4))):
            (model(shard.input).sum() * shard.weight).backward()
        time.sleep(0.08 if replica.rank == 1 else 0.0)
        optimizer.step()


def test_progress_is_logged_and_a_slow_worker_is_reported(launched: Any, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, slow_on_rank_1, replicas=3)
    launched(program, run_dir=tmp_path / "run").wait(WITHIN_S)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    last = {one["node"]: one for one in records if "total_steps" in one["values"]}
    assert set(last) == {"replicas/0", "replicas/1", "replicas/2"}
    for one in last.values():
        assert one["step"] == one["values"]["total_steps"] == STEPS
        assert one["values"]["reduced_bytes"] >= 4 * 20 and one["values"]["step_seconds"] >= 0.08
    assert last["replicas/0"]["values"]["wait_seconds"] > last["replicas/1"]["values"]["wait_seconds"]
    found = [(one["node"], ratio) for one in records if (ratio := one["values"].get("straggler/replicas/1"))]
    assert len(found) == 1 and found[0][0] == "replicas/0" and found[0][1] >= 2


def frozen_on_rank_1(replica: dp.Replica) -> None:
    for _ in replica.steps(1):
        replica.barrier()
        if replica.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        replica.all_reduce(torch.ones(5))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "direct", "gloo"])
def test_a_rank_that_is_frozen_is_named_with_the_call_and_line_of_the_others(
    launched: Any, backend: str, tmp_path: Path
) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, frozen_on_rank_1, replicas=3, backend=backend)
    run = launched(program, "process", run_dir=tmp_path / "run", hang_after=2.0)
    log = tmp_path / "run" / "hangs.log"
    frozen, file = "replicas/1's process has not answered", Path(__file__).name
    waiting = "to join all_reduce(sum, torch.float32, [5])"

    def is_reported() -> bool:
        lines = log.read_text().splitlines() if log.exists() else []
        return any(frozen in line and waiting in line and f"{file}:" in line for line in lines)

    until(is_reported)
    os.kill(run.status()["replicas"][1]["pid"], signal.SIGCONT)
    run.wait(WITHIN_S)


def test_a_trace_has_the_sum_of_each_bucket(launched: Any, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, three_steps, replicas=2)
    launched(program, run_dir=tmp_path / "run", trace=True).wait(WITHIN_S)
    written = json.loads((tmp_path / "run" / "trace.json").read_text())
    spans = [event for event in written["traceEvents"] if event.get("name") == "sum of gradients"]
    of_nodes: dict[int, list[tuple[int, int]]] = {}
    for span in spans:
        of_nodes.setdefault(span["pid"], []).append((span["args"]["bucket"], span["args"]["bytes"]))
    assert len(of_nodes) == 2  # nodes
    for sums in of_nodes.values():
        assert sorted({bucket for bucket, _ in sums}) == [0, 1] and len(sums) == 3 * 2
        assert dict(sums)[1] >= 4 * 16  # the weights, and the flags


def three_steps(replica: dp.Replica) -> None:
    model = nn.Linear(4, 4)
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.1), model, bucket_bytes=64)
    for _ in replica.steps(3):
        for shard in replica.shards((torch.ones(6, 4), torch.ones(6, 4))):
            (model(shard.input).sum() * shard.weight).backward()
        optimizer.step()
