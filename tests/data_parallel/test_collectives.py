"""Collectives of a training function: values, gradients, pytrees, and what clients of the training see."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp
from tests.data_parallel.loops import SEED, train

WORLD = 3
WITHIN_S = 30


def run(launched: Any, function: Any, *args: Any, **options: Any) -> Any:
    program = lp.Program("replicas")
    dp.add_replicas(program, function, *args, **{"replicas": WORLD, **options})
    launched(program).wait(WITHIN_S)


def values(replica: dp.Replica) -> None:
    rank, world = replica.rank, replica.world_size
    x = torch.arange(6.0) + rank
    assert torch.equal(replica.all_reduce(x), 3 * torch.arange(6.0) + 3) and torch.equal(x, torch.arange(6.0) + rank)
    assert torch.equal(replica.all_reduce(x, op="mean"), torch.arange(6.0) + 1)
    assert torch.equal(replica.all_reduce(x, op="max"), torch.arange(6.0) + 2)
    found = replica.all_reduce({"a": torch.tensor(rank), "b": (torch.ones(2), [torch.tensor([True])])})
    assert found["a"] == 3 and torch.equal(found["b"][0], torch.full((2,), 3.0))
    assert torch.equal(replica.all_gather(torch.tensor([rank])), torch.arange(3)[:, None])
    assert torch.equal(replica.broadcast(x, root=2), torch.arange(6.0) + 2)
    assert torch.equal(replica.reduce_scatter(x), (3 * torch.arange(6.0) + 3)[2 * rank : 2 * rank + 2])
    sent = torch.arange(world) + 10 * rank
    assert torch.equal(replica.all_to_all(sent), torch.arange(world) * 10 + rank)
    assert replica.map_reduce(lambda y: y.sum(), x) == sum(15 + 6 * r for r in range(3))
    assert (replica.replicas, replica.device, replica.logical_device(1)) == (
        (rank,),
        torch.device("cpu"),
        torch.device("cpu"),
    )
    assert replica.local_rank == rank and replica.generation >= 0
    replica.barrier()


def test_collectives_return_new_tensors_of_all_workers(launched: Any) -> None:
    run(launched, values)


def use_subgroups(replica: dp.Replica) -> None:
    """Call subgroups beside the overlapped sums of gradients, with a gradient through one."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.1), model, bucket_bytes=4)
    outer = replica.subgroup([2, 0])
    assert (outer is None) == (replica.rank == 1)
    for step in replica.steps(4):
        x = torch.full((3, 2), float(step))
        for shard in replica.shards((x, x)):
            y = model(shard.input).sum() + replica.rank
            mean = y if outer is None else outer.all_reduce(y, op="mean")
            (mean * shard.weight).backward()
        if outer is not None:
            assert torch.equal(outer.broadcast(torch.tensor(replica.rank), root=1), torch.tensor(2))
            assert torch.equal(outer.all_gather(torch.tensor(replica.rank)), torch.tensor([0, 2]))
        optimizer.step()
    weights = replica.all_gather(model.weight.detach())
    assert torch.equal(weights, weights[:1].expand_as(weights))
    for ranks in ([], [0, 0], [0, 3]):
        with pytest.raises(dp.DataParallelError):
            replica.subgroup(ranks)


@pytest.mark.parametrize(("mode", "backend"), [("thread", "auto"), ("thread", "direct"), ("process", "auto")])
def test_some_workers_call_each_other_alone(launched: Any, mode: str, backend: str) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, use_subgroups, replicas=WORLD, backend=backend)
    launched(program, mode).wait(WITHIN_S)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def gradients(replica: dp.Replica) -> None:
    rank, world = replica.rank, replica.world_size
    everyone = [
        torch.randn(world, 2, generator=torch.Generator().manual_seed(r), dtype=torch.double) for r in range(world)
    ]
    weights = torch.randn(world, world, 2, generator=torch.Generator().manual_seed(9), dtype=torch.double)
    calls = {
        "all_reduce": (lambda x: replica.all_reduce(x), lambda xs, r: sum(xs)),
        "mean": (lambda x: replica.all_reduce(x, op="mean"), lambda xs, r: sum(xs) / world),
        "max": (lambda x: replica.all_reduce(x, op="max"), lambda xs, r: torch.stack(xs).amax(0)),
        "broadcast": (lambda x: replica.broadcast(x, 1), lambda xs, r: xs[1]),
        "all_gather": (lambda x: replica.all_gather(x[0]), lambda xs, r: torch.stack([x[0] for x in xs])),
        "reduce_scatter": (lambda x: replica.reduce_scatter(x), lambda xs, r: sum(xs)[r : r + 1]),
        "all_to_all": (lambda x: replica.all_to_all(x), lambda xs, r: torch.stack([x[r] for x in xs])),
    }
    for name, (collective, same) in calls.items():
        own = everyone[rank].clone().requires_grad_()
        found = collective(own)
        (found * weights[rank][: len(found)]).sum().backward()
        leaves = [x.clone().requires_grad_() for x in everyone]
        losses = [(same(leaves, r) * weights[r][: len(same(leaves, r))]).sum() for r in range(world)]
        torch.stack(losses).sum().backward()
        assert torch.allclose(found, same(everyone, rank)), name
        expected = leaves[rank].grad if leaves[rank].grad is not None else torch.zeros_like(own)
        assert torch.allclose(own.grad, expected), name


def test_gradients_are_those_of_the_sum_of_all_losses(launched: Any) -> None:
    run(launched, gradients)


def collective_in_the_loop(replica: dp.Replica, folder: str) -> None:
    """Log the loss before each optimizer step, and use a collective in the forward of a loss."""
    model = nn.Linear(4, 1)
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.1), model, bucket_bytes=4)
    for step in replica.steps(6):
        total = torch.zeros(())
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(step))
        for shard in replica.shards((x, x.sum(1, keepdim=True)), microbatches=2):
            mean = replica.all_reduce(model(shard.input).mean(), op="mean") if step > 2 else 0
            loss = ((model(shard.input) - shard.target - mean) ** 2).mean() * shard.weight
            loss.backward()
            total += loss.detach()
        logged = replica.all_reduce(total)
        optimizer.step()
        assert torch.equal(replica.all_gather(logged), logged.expand(replica.world_size))
    whole = replica.all_gather(model.weight.detach())
    assert torch.equal(whole, whole[:1].expand_as(whole))


def test_collectives_may_come_anywhere_in_a_step(launched: Any, tmp_path: Path) -> None:
    run(launched, collective_in_the_loop, str(tmp_path))


def test_clients_see_the_training_between_two_steps(launched: Any, tmp_path: Path) -> None:
    program = lp.Program("replicas")
    handle = dp.add_replicas(program, train, str(tmp_path), 3000, replicas=2, seed=SEED)
    client = launched(program).client(handle)
    first = client.current_step()
    state = client.state_dict()
    assert client.membership().world_size == 2 and len(client.fingerprint()) == 64
    assert first <= client.current_step() and set(state) == {"model", "optimizer", "scheduler"}


def train_without_end(replica: dp.Replica, ended: list[bool]) -> None:
    model = nn.Linear(2, 1)
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for step in replica.steps(1_000_000):
        if replica.rank == 0 and step == 3:
            lp.stop()
        for shard in replica.shards((torch.ones(4, 2), torch.ones(4, 1))):
            ((model(shard.input) - shard.target).pow(2).mean() * shard.weight).backward()
        optimizer.step()
    ended.append(True)


@pytest.mark.parametrize("on_failure", ["stop", "restart"])
def test_a_stop_ends_the_loop_without_what_follows_it(launched: Any, on_failure: str) -> None:
    program, ended = lp.Program("stopped"), list[bool]()
    dp.add_replicas(program, train_without_end, ended, replicas=2, seed=SEED, on_failure=on_failure)
    run = launched(program, grace=60.0)
    assert run.wait(30.0) is None and not ended


def accumulating(replica: dp.Replica, folder: str) -> None:
    """Accumulate over several batches in a step, with two optimizers."""
    with pp.layer_rng(SEED, 0):
        first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    one = replica.optimizer(torch.optim.SGD(first.parameters(), 0.1), first, bucket_bytes=8)
    two = replica.optimizer(torch.optim.Adam(second.parameters(), 0.1), second, bucket_bytes=8)
    for step in replica.steps(5):
        for part in range(2):
            x = torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + part))
            for shard in replica.shards((x, x)):
                (second(torch.tanh(first(shard.input))).pow(2).mean() * shard.weight).backward()
        assert one.step() and two.step()
    torch.save([*first.parameters(), *second.parameters()], Path(folder) / f"{replica.world_size}-{replica.rank}.pt")


def test_accumulation_and_two_optimizers_do_not_depend_on_the_workers(launched: Any, tmp_path: Path) -> None:
    for workers in (1, 2, 3):
        run(launched, accumulating, str(tmp_path), workers=workers)
    first, *others = [torch.load(file) for file in tmp_path.glob("*.pt")]
    assert len(others) == 5 and all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def use_torchs_group(replica: dp.Replica) -> None:
    group = replica.process_group
    assert (dist.get_rank(), dist.get_world_size()) == (replica.rank, 2) and replica.process_group is group
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False), process_group=group)
    model(torch.full((1, 2), 1.0 + replica.rank)).sum().backward()
    (weight,) = model.parameters()
    assert torch.equal(weight.grad, torch.full((1, 2), 1.5))


def test_torchs_wrappers_work_over_the_process_group(launched: Any) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, use_torchs_group, replicas=2)
    launched(program, "process").wait(WITHIN_S)


def test_threads_have_no_process_group(launched: Any) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, use_torchs_group, replicas=2)
    with pytest.raises(lp.NodeError, match="process") as failed:
        launched(program).wait(WITHIN_S)
    assert failed.value.type_name == "NotSupported"
