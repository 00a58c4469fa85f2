"""With mode="async" servers apply each worker's gradient once, as it comes, and all end with the same parameters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.data_parallel as dp

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
