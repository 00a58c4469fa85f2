"""Gradients are exchanged in few buckets, and while the last backward goes on."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from lp_pipe.data_parallel import buckets
from lp_pipe.data_parallel.exchange import Exchange
from tests.collectives.joined import Joined
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


class FakeStream:
    """A GPU's stream that notes what is queued on it, and on which other work that waits."""

    def __init__(self, *_: Any) -> None:
        self.queued: list[str] = []

    def __enter__(self) -> "FakeStream":
        of_thread.stream = self
        return self

    def __exit__(self, *_: Any) -> None:
        of_thread.stream = None

    def wait_event(self, event: list[str]) -> None:
        self.queued += [one for one in event if one not in self.queued]


of_thread: Any = threading.local()


def test_on_a_gpu_sums_come_after_their_gradients_and_the_update_after_the_sums(monkeypatch: Any) -> None:
    main = FakeStream()

    def current_stream(*_: Any) -> FakeStream:
        return getattr(of_thread, "stream", None) or main

    def summed(self: buckets.GradientBuckets, bucket: buckets.Bucket) -> None:
        bucket.total = bucket.slots[0]
        self._complete(bucket)
        assert f"gradients {bucket.number}" in current_stream().queued
        current_stream().queued.append(f"sum {bucket.number}")

    def event_now(_: Any) -> list[str]:
        if current_stream() is main:
            main.queued.append(f"gradients {sum(one.startswith('gradients') for one in main.queued)}")
        return list(current_stream().queued)

    monkeypatch.setattr(torch, "Stream", FakeStream)
    monkeypatch.setattr(torch.accelerator, "current_stream", current_stream)
    monkeypatch.setattr(buckets, "event_now", event_now)
    monkeypatch.setattr(buckets.GradientBuckets, "_sum", summed)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])
    joined = Joined("inproc", 2)
    exchange = Exchange(joined.backends[0], [1, 1], 0)
    own = buckets.GradientBuckets(list(model.named_parameters()), exchange, 1024, lambda: [])
    own._expected = dict.fromkeys(range(4), 1)
    own.begin_step()
    own.select(0, is_last=True)
    own.open_window(sends_early=True)
    model(torch.ones(1, 16)).sum().backward()
    until(lambda: own.summed == 4)
    assert "sum 0" not in main.queued  # the backward has not waited for sums
    own.finish()
    assert [one for one in main.queued if one.startswith("sum")] == [f"sum {number}" for number in range(4)]
    own.close()
    joined.close()
