"""Each row of the table of bad input ends with a clear error on every rank, at most a second after the other ranks'."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from lp_pipe.data_parallel.add import ReplicaWorker
from lp_pipe.errors import DataParallelError
from tests.data_parallel.loops import batch, build

WITHIN_S = 30
REPLICAS = 3


def returns_early(replica: dp.Replica) -> None:
    model = build()
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters()), model)
    for step in replica.steps(5):
        if step == 2 and replica.rank == 1:
            return
        for shard in replica.shards(batch(step)):
            (model(shard.input).sum() * shard.weight).backward()
        optimizer.step()


def counts_other_steps(replica: dp.Replica) -> None:
    for _ in replica.steps(2 + replica.rank):
        replica.barrier()


def has_another_shape(replica: dp.Replica) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2 + (replica.rank == 1)))
    replica.optimizer(torch.optim.SGD(model.parameters()), model)


def has_another_layer(replica: dp.Replica) -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + (replica.rank == 1))])
    replica.optimizer(torch.optim.SGD(model.parameters()), model)


def has_another_dtype(replica: dp.Replica) -> None:
    model = nn.Linear(2, 2).to(torch.float64 if replica.rank == 1 else torch.float32)
    replica.optimizer(torch.optim.SGD(model.parameters()), model)


def has_other_parameters(replica: dp.Replica) -> None:
    replica.optimizer(torch.optim.SGD(nn.Linear(3, 7).parameters()), nn.Linear(3, 7))


def has_no_tensors(replica: dp.Replica) -> None:
    for _ in replica.steps(1):
        list(replica.shards(("text", [1, 2])))


def has_no_tensors_on_one_rank(replica: dp.Replica) -> None:
    for _ in replica.steps(1):
        for shard in replica.shards(batch(1) if replica.rank != 1 else ({"x": object()}, torch.zeros(3))):
            shard.input.sum()
        replica.barrier()


def reduces_no_tensors(replica: dp.Replica) -> None:
    replica.all_reduce({"loss": 3.0})


def makes_another_call(replica: dp.Replica) -> None:
    replica.broadcast(torch.zeros(2)) if replica.rank == 1 else replica.all_reduce(torch.zeros(2))


def has_another_root(replica: dp.Replica) -> None:
    replica.broadcast(torch.zeros(2), root=int(replica.rank == 1))


def reduces_another_shape(replica: dp.Replica) -> None:
    replica.all_reduce(torch.zeros(2 + (replica.rank == 1)))


def makes_calls_in_another_order(replica: dp.Replica) -> None:
    for call in (replica.all_reduce, replica.all_gather)[:: -1 if replica.rank == 1 else 1]:
        call(torch.zeros(2))


@dataclass
class Row:
    """Bad input. errors: classes of which each rank raises one; words: in the error of each rank in `named`."""

    train: Callable[[dp.Replica], None]
    errors: tuple[str, ...]
    words: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    named: tuple[int, ...] = (0, 1, 2)


PARALLEL, MISMATCH, GONE = "DataParallelError", "CollectiveMismatch", "GenerationOver"
TABLE = [
    Row(returns_early, (MISMATCH,), ("rank 1", "agree")),
    Row(counts_other_steps, (MISMATCH, PARALLEL), ("replicas/",)),
    Row(has_another_shape, (PARALLEL,), ("1.weight", "[2, 2]", "[3, 2]", "rank 1")),
    Row(has_another_layer, (PARALLEL,), ("rank 1", "2", "4")),
    Row(has_another_dtype, (PARALLEL,), ("weight", "float64", "float32", "rank 1")),
    Row(has_other_parameters, (PARALLEL,), ("2 of the 2", "[7, 3]")),
    Row(has_no_tensors, (PARALLEL,), ("str",)),
    Row(has_no_tensors_on_one_rank, (PARALLEL, GONE), ("dict",), named=(1,)),
    Row(reduces_no_tensors, (PARALLEL,), ("float",)),
    Row(makes_another_call, (MISMATCH,), ("all_reduce", "broadcast", "test_bad_input.py:")),
    Row(makes_another_call, (MISMATCH,), ("all_reduce", "broadcast", "test_bad_input.py:"), {"backend": "direct"}),
    Row(has_another_root, (MISMATCH,), ("root=0", "root=1")),
    Row(reduces_another_shape, (MISMATCH,), ("[2]", "[3]")),
    Row(makes_calls_in_another_order, (MISMATCH,), ("all_reduce", "all_gather")),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join([row.train.__name__, *row.options.values()]))
def test_bad_input_is_an_error_on_all_ranks(launched: Any, monkeypatch: pytest.MonkeyPatch, row: Row) -> None:
    raised: dict[int, tuple[float, Exception]] = {}
    all_raised, run_worker = threading.Event(), ReplicaWorker.run

    def recording(worker: ReplicaWorker) -> None:
        try:
            run_worker(worker)
        except Exception as error:
            raised[lp.context().index] = time.monotonic(), error
            if len(raised) == REPLICAS:
                all_raised.set()
            all_raised.wait(WITHIN_S)  # else the first failure stops the program, and so the other ranks
            raise

    monkeypatch.setattr(ReplicaWorker, "run", recording)
    program = lp.Program("replicas")
    dp.add_replicas(program, row.train, replicas=REPLICAS, **row.options)
    with pytest.raises(lp.NodeError):
        launched(program).wait(WITHIN_S)
    assert sorted(raised) == [*range(REPLICAS)]
    assert all(type(error).__name__ in row.errors for _, error in raised.values()), raised
    for rank in row.named:
        assert all(word in str(raised[rank][1]) for word in row.words), raised
    times = [at for at, _ in raised.values()]
    assert max(times) - min(times) < 1.0


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"mode": "async"}, DataParallelError, "Servers"),
        ({"workers": 4}, DataParallelError, "workers=4"),
        ({"workers": "0:2"}, DataParallelError, "0:2"),
        ({"workers": "4:5"}, DataParallelError, "4:5"),
    ],
)
def test_bad_options_are_errors_at_setup(options: dict[str, Any], error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        dp.add_replicas(lp.Program("replicas"), returns_early, replicas=REPLICAS, **options)
