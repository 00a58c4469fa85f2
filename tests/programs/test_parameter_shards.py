"""Shards, without a program around them: one is one server's part of the parameters."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
from lp_pipe.programs.generations import StaleGeneration
from lp_pipe.programs.parameter_shards import (
    AsyncShard,
    ParameterShard,
    Sgd,
    SyncShard,
    at_the_beginning,
)
from tests.programs.conftest import WITHIN_S

ONE = np.ones(1)
InANode = Callable[[Callable[[], Any]], None]


@pytest.fixture
def in_a_node(no_leaks: None) -> InANode:
    def run(function: Callable[[], Any]) -> None:
        program = lp.Program("shards")
        program.add_node(lp.PyNode(lambda: asyncio.run(function())), label="node")
        lp.launch(program, "thread").wait(WITHIN_S)

    return run


async def opened(kind: Any, num_workers: int, *, size: int = 1, cuts: tuple[int, ...] = ()) -> Any:
    """Open a shard of zeros, in generation "g", with plain descent."""
    shard = kind(Sgd(1.0, 0.0), cuts)
    await shard.open("g", at_the_beginning(np.zeros(size), num_workers))
    return shard


async def waiting(call: Any) -> "asyncio.Task[Any]":
    """The call, which cannot end now."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0)
    assert not task.done()
    return task


def test_a_worker_that_died_between_two_shards_goes_on_where_the_slower_one_is(in_a_node: InANode) -> None:
    async def body() -> None:
        ahead, behind = [await opened(SyncShard, 2, size=2, cuts=(2,)) for _ in range(2)]
        gradient = np.ones(2)
        others = [asyncio.create_task(shard.push("g", 1, 0, 0, 3 * gradient)) for shard in (ahead, behind)]
        assert (await ahead.push("g", 0, 0, 0, gradient)).parameters.tolist() == [-2.0, -2.0]
        # Dead, and started again: one shard is at step 1, the other waits for step 0.
        assert [(await shard.join(0)).step for shard in (ahead, behind)] == [1, 0]
        assert [(await shard.pull("g", 0)).parameters.tolist() for shard in (ahead, behind)] == [[0, 0], [0, 0]]
        again = [await shard.push("g", 0, 0, 0, gradient) for shard in (ahead, behind)]
        assert [(snapshot.version, snapshot.parameters.tolist()) for snapshot in again] == [(1, [-2, -2])] * 2
        await asyncio.gather(*others)
        for shard in (ahead, behind):
            await asyncio.gather(*(shard.push("g", rank, 1, 1, gradient) for rank in range(2)))
        assert [(await shard.take("g", 2)).repeated for shard in (ahead, behind)] == [1, 0]

    in_a_node(body)


def test_a_repeated_asynchronous_gradient_is_refused_and_staleness_counted(in_a_node: InANode) -> None:
    async def body() -> None:
        shard = await opened(AsyncShard, 2, cuts=(2,))
        await shard.push("g", 0, 0, 0, ONE)
        await shard.push("g", 0, 0, 0, ONE)
        newest = await shard.push("g", 1, 0, 0, ONE)  # one update late: it counts a half
        assert (newest.version, newest.parameters.tolist(), newest.mean_staleness) == (2, [-1.5], 0.5)
        state = await shard.take("g", 2)
        assert (state.updates, state.repeated, state.max_staleness) == ((1, 1), 1, 1)

    in_a_node(body)


def test_workers_wait_for_a_shard_to_be_opened_and_begin_where_its_state_is(in_a_node: InANode) -> None:
    async def body() -> None:
        before = SyncShard(Sgd(1.0, 0.5), cuts=[2])
        await before.open("g", at_the_beginning(np.zeros(1), 1))
        for step in range(2):
            await before.push("g", 0, step, step, ONE)
        after = SyncShard(Sgd(1.0, 0.5))
        joining = await waiting(after.join(0))
        await after.open("h", await before.take("g", 2))
        assert await joining == ("h", 2)
        assert await before.push("g", 0, 2, 2, ONE) == await after.push("h", 0, 2, 2, ONE)

    in_a_node(body)


def test_workers_wait_when_nobody_takes_the_states_that_are_kept(in_a_node: InANode) -> None:
    async def body() -> None:
        shard = await opened(AsyncShard, 1, cuts=(1, 2, 3))
        for step in range(2):
            await shard.push("g", 0, step, step, ONE)
        third = await waiting(shard.push("g", 0, 2, 2, ONE))
        assert (await shard.take("g", 1)).snapshot.parameters.tolist() == [-1.0]
        assert (await third).version == 3

    in_a_node(body)


@pytest.mark.parametrize("kind", [SyncShard, AsyncShard])
def test_a_new_generation_forgets_what_the_old_one_did_and_frees_all_who_wait_in_it(
    in_a_node: InANode, kind: type[ParameterShard]
) -> None:
    async def body() -> None:
        shard = await opened(kind, 1, cuts=(1, 2, 4))
        for step in range(2):
            await shard.push("g", 0, step, step, ONE)
        waiters = [await waiting(call) for call in (shard.push("g", 0, 2, 2, ONE), shard.take("g", 4))]
        waiters.append(await waiting(shard.outlive("g")))
        await shard.open("h", at_the_beginning(np.zeros(1), 1))
        for waiter in waiters:
            with pytest.raises(StaleGeneration, match="generation g is over, now there is h"):
                await waiter
        assert await shard.join(0) == ("h", 0)
        taking = await waiting(shard.take("h", 1))  # what was kept is forgotten, too
        await shard.push("h", 0, 0, 0, 5 * ONE)
        assert (await taking).snapshot.parameters.tolist() == [-5.0]

    in_a_node(body)


@pytest.mark.parametrize("kind", [SyncShard, AsyncShard])
def test_a_late_call_of_an_old_generation_changes_nothing(in_a_node: InANode, kind: type[ParameterShard]) -> None:
    async def body() -> None:
        shard = await opened(kind, 1, cuts=(1,))
        await shard.open("h", at_the_beginning(np.zeros(1), 1))
        for call in (shard.push("g", 0, 0, 0, ONE), shard.pull("g", 0), shard.take("g", 1), shard.outlive("g")):
            with pytest.raises(StaleGeneration):
                await call
        assert await shard.join(0) == ("h", 0)

    in_a_node(body)


def test_a_gradient_that_waited_for_another_worker_counts_in_its_generation_only(in_a_node: InANode) -> None:
    async def body() -> None:
        shard = await opened(SyncShard, 2)
        early = await waiting(shard.push("g", 0, 0, 0, 100 * ONE))
        await shard.open("h", at_the_beginning(np.zeros(1), 2))
        with pytest.raises(StaleGeneration):
            await early
        alone = await waiting(shard.push("h", 1, 0, 0, ONE))
        await shard.push("h", 0, 0, 0, ONE)
        assert (await alone).parameters.tolist() == [-1.0]

    in_a_node(body)


def test_a_server_that_was_just_started_serves_nobody(in_a_node: InANode) -> None:
    async def body() -> None:
        shard = SyncShard(Sgd(), cuts=[1])
        with pytest.raises(StaleGeneration, match="now there is none yet"):
            await shard.take("g", 1)

    in_a_node(body)
