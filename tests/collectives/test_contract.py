"""Every backend gives the same exact results, and ends the same way when a rank is gone or in another call."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache, partial, reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from lp_pipe.collectives.backend import Backend, GenerationOver
from lp_pipe.collectives.group import Group
from lp_pipe.errors import CollectiveMismatch
from lp_pipe.telemetry import waits
from tests.collectives.joined import EXACT, WITHIN_S, Joined
from tests.waiting import until

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.complex64, torch.int64, torch.bool)
SIZES = (0, 1, 65, 20_001)

Join = Callable[[int], Joined]


@pytest.fixture(params=[*EXACT, "gloo"])
def join(request: pytest.FixtureRequest) -> Iterator[Join]:
    joined: list[Joined] = []

    def start(count: int) -> Joined:
        joined.append(Joined(request.param, count))
        return joined[-1]

    yield start
    for one in joined:
        one.close()


@cache
def tensor_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    values = torch.randn(numel, generator=generator, dtype=torch.float64) * 10
    return values > 0 if dtype == torch.bool else values.to(dtype)


@cache
def reduced(op: str, count: int, numel: int, dtype: torch.dtype) -> Tensor:
    return expected(op, [tensor_of(rank, numel, dtype) for rank in range(count)])


def expected(op: str, tensors: list[Tensor]) -> Tensor:
    function = {"sum": torch.add, "mean": torch.add, "min": torch.minimum, "max": torch.maximum}[op]
    total = reduce(function, tensors)
    return total / len(tensors) if op == "mean" else total


def kept_by(backend: Backend) -> tuple[Callable[[Tensor, Tensor], bool], tuple[torch.dtype, ...]]:
    """How a backend's sums compare with those in rank order, and the dtypes that it has."""
    if backend.is_exact:
        return torch.equal, DTYPES
    return partial(torch.allclose, rtol=1e-4, atol=1e-4), (torch.float32, torch.float64, torch.int64)


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype.is_complex:
        return "sum", "mean"
    return ("sum", "mean", "min", "max") if dtype.is_floating_point else ("sum", "min", "max")


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_reductions_are_in_rank_order_for_every_dtype_and_size(join: Join, count: int) -> None:
    cases = [(dtype, op, numel) for dtype in DTYPES for op in ops_of(dtype) for numel in SIZES]
    for dtype, op, numel in cases:
        reduced(op, count, numel, dtype)

    def rank_code(backend: Backend) -> None:
        same, known = kept_by(backend)
        for number, (dtype, op, numel) in enumerate(cases):
            if dtype not in known:
                continue
            own = tensor_of(backend.rank, numel, dtype).clone()
            if number % 2:  # in the group's memory, or the caller's own
                own = backend.empty(numel, dtype).copy_(own)
            backend.all_reduce(own, op)
            assert same(own, reduced(op, count, numel, dtype)), (dtype, op, numel)

    join(count).run(rank_code)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_parts_and_copies_arrive_where_they_belong(join: Join, count: int) -> None:
    def rank_code(backend: Backend) -> None:
        same, known = kept_by(backend)
        for dtype in known:
            for part in (0, 1, 3001):
                inputs = [tensor_of(rank, part * count, dtype) for rank in range(count)]
                own, rank = inputs[backend.rank].clone(), backend.rank
                mine = slice(rank * part, (rank + 1) * part)
                output = backend.empty(part, dtype)
                backend.reduce_scatter(output, own)
                assert same(output, expected("sum", inputs)[mine]), (dtype, part)
                backend.reduce_scatter(own[mine], own)  # as FSDP does
                assert same(own[mine], expected("sum", inputs)[mine]), (dtype, part)
                own = inputs[backend.rank].clone()
                whole = torch.empty(count * part * count, dtype=dtype)
                backend.all_gather(whole, own)
                assert torch.equal(whole, torch.cat(inputs)), (dtype, part)
                swapped = torch.empty_like(own)
                backend.all_to_all(swapped, own)
                assert torch.equal(swapped, torch.cat([one[mine] for one in inputs])), (dtype, part)
                for root in range(count):
                    copy = own.clone()
                    backend.broadcast(copy, root)
                    assert torch.equal(copy, inputs[root]), (dtype, part, root)

    join(count).run(rank_code)


def test_agree_tells_whether_all_gave_the_same_value(join: Join) -> None:
    def rank_code(backend: Backend) -> list[bool]:
        found = [backend.agree(7), backend.agree(backend.rank), backend.agree(1 << 40)]
        backend.barrier()
        return found

    assert join(3).run(rank_code) == [[True, False, True]] * 3


def test_calls_that_differ_raise_at_both_and_name_both_lines(join: Join) -> None:
    times: list[float] = []

    def rank_code(backend: Backend) -> None:
        started = time.monotonic()
        try:
            if backend.rank == 0:
                backend.all_reduce(torch.ones(3))
            elif backend.rank == 1:
                backend.broadcast(torch.ones(3), 0)
            else:
                time.sleep(0.2)
                backend.barrier()
        finally:
            times.append(time.monotonic() - started)

    for future in join(3).start(rank_code):
        error = future.exception(WITHIN_S)
        assert isinstance(error, CollectiveMismatch)
        for named in ("ranks/0", "all_reduce", "ranks/1", "broadcast", "test_contract.py:"):
            assert named in str(error)
    assert max(times) < 1.0


@pytest.mark.parametrize("other", ["dtype", "shape", "op", "root"])
def test_every_difference_is_a_mismatch(join: Join, other: str) -> None:
    def rank_code(backend: Backend) -> None:
        differs = backend.rank == 1
        if other == "root":
            backend.broadcast(torch.ones(4), int(differs))
        elif other == "op":
            backend.all_reduce(torch.ones(4), "min" if differs else "max")
        else:
            changed = torch.ones(2, 2) if other == "shape" else torch.ones(4, dtype=torch.float64)
            backend.all_reduce(changed if differs else torch.ones(4))

    futures = join(2).start(rank_code)
    assert [type(future.exception(WITHIN_S)) for future in futures] == [CollectiveMismatch] * 2


def calls(backend: Backend) -> dict[str, Callable[[], Any]]:
    count = backend.world_size
    return {
        "all_reduce": lambda: backend.all_reduce(torch.ones(1000)),
        "reduce_scatter": lambda: backend.reduce_scatter(torch.ones(10), torch.ones(10 * count)),
        "all_gather": lambda: backend.all_gather(torch.ones(10 * count), torch.ones(10)),
        "broadcast": lambda: backend.broadcast(torch.ones(10), 0),
        "all_to_all": lambda: backend.all_to_all(torch.ones(10 * count), torch.ones(10 * count)),
        "barrier": backend.barrier,
        "agree": lambda: backend.agree(1),
    }


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "agree"])
def test_a_rank_that_does_not_come_ends_the_calls_of_the_others(join: Join, name: str) -> None:
    joined = join(3)

    def rank_code(backend: Backend) -> None:
        backend.barrier()
        if backend.rank != 1:  # which dies here
            calls(backend)[name]()
            raise AssertionError("the call has ended without rank 1")

    futures = joined.start(rank_code)
    futures[1].result(WITHIN_S)
    time.sleep(0.05)  # the others wait by now
    for backend in (joined.backends[0], joined.backends[2]):
        backend.abort("node ranks/1 has failed")
    assert_over(futures[0], futures[2])
    with pytest.raises(GenerationOver, match="ranks/1"):
        joined.backends[0].barrier()


def test_a_wait_names_the_rank_that_is_late(join: Join) -> None:
    joined = join(2)
    future, other = joined.start(lambda backend: backend.barrier() if backend.rank == 0 else None)
    other.result(WITHIN_S)
    late = "ranks/1" if joined.backends[0].is_exact else "other ranks"  # gloo does not tell
    until(lambda: any(one.is_wait and one.peer == late for _, one in waits.look(60)), WITHIN_S)
    joined.backends[0].abort("enough")
    assert_over(future)


def test_a_rank_that_has_left_ends_the_calls_of_the_others(join: Join) -> None:
    joined = join(2)

    def rank_code(backend: Backend) -> None:
        backend.barrier()
        if backend.rank == 1:
            backend.close()
        else:
            backend.barrier()

    futures = joined.start(rank_code)
    futures[1].result(WITHIN_S)
    assert_over(futures[0])


def test_a_call_that_all_have_made_succeeds_though_a_rank_leaves_right_after(join: Join) -> None:
    def rank_code(backend: Backend) -> float:
        total = torch.ones(100)
        backend.all_reduce(total)
        backend.close()
        return float(total.sum())

    if not join(3).backends[0].is_exact:
        return  # torch's ranks may need a connection that a rank which is done has closed
    for _ in range(20):
        assert join(3).run(rank_code) == [300.0] * 3


def test_memory_of_a_group_outlives_it(join: Join) -> None:
    joined = join(2)

    def rank_code(backend: Backend) -> Tensor:
        total = backend.empty(10, torch.float32).fill_(1.0)
        backend.all_reduce(total)
        return total

    results = joined.run(rank_code)
    joined.close()
    assert all(result.tolist() == [2.0] * 10 for result in results)


def assert_over(*futures: "Future[Any]") -> None:
    for future in futures:
        assert isinstance(future.exception(WITHIN_S), GenerationOver)


def test_subgroups_are_joined_apart_from_the_group(join: Join) -> None:
    def use(backend: Backend) -> None:
        for ranks in ([0, 2], [1, 3], [0, 1, 2], [0, 1, 2, 3], [backend.rank]):
            if backend.rank not in ranks:
                continue
            part = backend.subgroup(ranks)
            for numel in (1, 20_001):
                tensor = tensor_of(backend.rank, numel, torch.float64).clone()
                part.all_reduce(tensor)
                total = expected("sum", [tensor_of(rank, numel, torch.float64) for rank in ranks])
                assert torch.equal(tensor, total) if backend.is_exact else torch.allclose(tensor, total)
            known = torch.tensor([part.rank])
            part.broadcast(known, len(ranks) - 1)
            assert known == len(ranks) - 1 and part.rank == ranks.index(backend.rank)
            part.barrier()
            part.close()
        total = torch.tensor([backend.rank])
        backend.all_reduce(total)
        assert total == 6

    join(4).run(use)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_subgroup_ends_with_the_group(join: Join, is_open: bool) -> None:
    def use(backend: Backend) -> None:
        group = groups[backend.rank]
        if is_open:
            group.subgroup([0, 1])
        if backend.rank == 0:
            with pytest.raises(GenerationOver):
                group.subgroup([0, 1]).backend.barrier()

    joined = join(2)
    groups = [Group(backend.membership, backend) for backend in joined.backends]
    first, second = joined.start(lambda backend: use(backend) if is_open or backend.rank == 0 else None)
    second.result(WITHIN_S)
    until(lambda: any(one.is_wait for _, one in waits.look(0)) or first.done(), WITHIN_S)
    groups[0].abort("rank 1 is gone")
    first.result(WITHIN_S)
    for group in groups:
        group.close()
