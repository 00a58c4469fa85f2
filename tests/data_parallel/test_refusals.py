"""Programs and loops that cannot be right end with an error that names the cause, on all workers, and none hangs."""

from typing import Any

import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from lp_pipe.errors import DataParallelError, LpPipeError, NotSupported
from tests.data_parallel.loops import batch, build

WITHIN_S = 30


def nothing(replica: dp.Replica) -> None: ...


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"replicas": 0}, DataParallelError, "replicas"),
        ({"replicas": 2, "workers": 3}, DataParallelError, "workers=3"),
        ({"replicas": 2, "workers": "3:2"}, DataParallelError, "3:2"),
        ({"replicas": 2, "workers": "two"}, DataParallelError, "two"),
        ({"replicas": 2, "on_failure": "ignore"}, DataParallelError, "ignore"),
        ({"replicas": 2, "backend": "mpi"}, DataParallelError, "mpi"),
        ({"replicas": 2, "mode": "async"}, DataParallelError, "Servers"),
        ({"replicas": 2, "backend": dp.Servers(2), "mode": "async", "on_failure": "shrink"}, NotSupported, "shrink"),
        ({"replicas": 2, "backend": dp.Servers(0), "mode": "async"}, DataParallelError, "async"),
        ({"replicas": 2, "backend": dp.Servers(0, colocated=False)}, DataParallelError, "got 0"),
        ({"replicas": 2, "backend": dp.Servers(1, compression="topk")}, DataParallelError, "topk"),
        ({"replicas": 2, "what": 1}, TypeError, "what"),
    ],
)
def test_options_that_cannot_be_are_refused_at_setup(options: dict[str, Any], error: type, word: str) -> None:
    with pytest.raises(error, match=word):
        dp.add_replicas(lp.Program("replicas"), nothing, **options)


def sparse(replica: dp.Replica) -> None:
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters()), model)
    for _ in replica.steps(1):
        for shard in replica.shards((torch.arange(4), torch.zeros(4))):
            model(shard.input).sum().backward()
        optimizer.step()


def no_pair(replica: dp.Replica) -> None:
    for _ in replica.steps(1):
        list(replica.shards(torch.zeros(3)))


def zero(replica: dp.Replica) -> None:
    replica.optimizer(torch.optim.SGD(build().parameters()), build(), zero=2)


def whole_parameters(replica: dp.Replica) -> None:
    replica.optimizer(torch.optim.Adafactor(build().parameters()), build(), zero=1)


def fused(replica: dp.Replica) -> None:
    replica.optimizer(torch.optim.AdamW(build().parameters(), fused=True), build(), zero=1)


def other_call(replica: dp.Replica) -> None:
    if replica.rank:
        replica.broadcast(torch.zeros(2))
    else:
        replica.all_reduce(torch.zeros(2))


def no_state(replica: dp.Replica) -> None:
    list(replica.steps(1, model=3))


def late_gradient(replica: dp.Replica) -> None:
    model = build()
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters()), model)
    for step in replica.steps(5):
        for _ in range(1 + (step == 3)):
            for shard in replica.shards(batch(1)):
                (model(shard.input).sum() * shard.weight).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("train", "error", "word"),
    [
        (sparse, "DataParallelError", "weight"),
        (no_pair, "DataParallelError", "pair"),
        (no_state, "DataParallelError", "model"),
        (zero, "NotSupported", "zero=2"),
        (whole_parameters, "NotSupported", "Adafactor"),
        (fused, "NotSupported", "AdamW.*fused"),
        (late_gradient, "DataParallelError", "shards"),
    ],
)
def test_loops_that_cannot_be_right_end_with_an_error(launched: Any, train: Any, error: str, word: str) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, train, replicas=2)
    with pytest.raises(lp.NodeError, match=word) as failed:
        launched(program).wait(WITHIN_S)
    assert failed.value.type_name == error


def test_collectives_before_the_loop_are_refused_where_workers_may_change(launched: Any) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, other_call, replicas=2, on_failure="shrink", workers="2:2")
    with pytest.raises(lp.NodeError, match="steps") as failed:
        launched(program).wait(WITHIN_S)
    assert failed.value.type_name == "RuntimeError"


def other_call_in_a_step(replica: dp.Replica) -> None:
    for _ in replica.steps(2):
        other_call(replica)


@pytest.mark.parametrize("on_failure", ["restart", "shrink"])
def test_calls_that_do_not_match_are_not_tried_again(launched: Any, on_failure: str) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, other_call_in_a_step, replicas=2, on_failure=on_failure)
    run = launched(program)
    with pytest.raises(lp.NodeError) as failed:
        run.wait(WITHIN_S)
    assert failed.value.type_name == "CollectiveMismatch"


def test_the_errors_are_lp_pipe_errors() -> None:
    assert issubclass(NotSupported, NotImplementedError) and issubclass(DataParallelError, ValueError)
    assert issubclass(dp.CollectiveMismatch, LpPipeError)
