"""Gradients are exchanged in few buckets, and while the last backward goes on."""

from typing import Any

import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from tests.waiting import until

WITHIN_S = 30


def sums_early(replica: dp.Replica) -> None:
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(8)])
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.1), model, bucket_bytes=2 * 1024)
    x = torch.ones(2, 16)
    for step in replica.steps(4):
        for shard in replica.shards((x, x)):
            (model(shard.input).sum() * shard.weight).backward()
        if step:  # the first step finds out which gradients there are
            until(lambda: optimizer.buckets.summed == 4)
        else:
            assert optimizer.buckets.summed == 0
        assert optimizer.buckets.count == 4
        optimizer.step()


def test_sums_begin_before_the_optimizer_steps(launched: Any) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, sums_early, replicas=2)
    launched(program).wait(WITHIN_S)


def many_small(replica: dp.Replica, bucket_bytes: int, expected: int) -> None:
    """Train without `steps` and `shards`: each worker is a replica."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(5000)) for _ in range(200)])
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.5), model, bucket_bytes=bucket_bytes)
    for step in range(1, 4):
        torch.stack([parameter.sum() for parameter in model]).sum().backward()
        optimizer.step()
        assert optimizer.buckets.count == expected
        assert torch.equal(model[7], torch.full((5000,), -1.0 * step)) and model[7].grad is None


@pytest.mark.parametrize(("bucket_bytes", "expected"), [(4 << 20, 1), (1 << 20, 4)])
def test_a_step_has_one_exchange_for_each_bucket(launched: Any, bucket_bytes: int, expected: int) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, many_small, bucket_bytes, expected, replicas=2)
    launched(program).wait(WITHIN_S)
