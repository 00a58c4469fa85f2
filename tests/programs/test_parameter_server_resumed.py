"""A parameter server that was ended half-way goes on from its newest checkpoint: same bits, no update twice."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
from lp_pipe.checkpoint import checkpoints_in
from lp_pipe.programs.parameter_server import TrainingResult, parameter_server
from lp_pipe.programs.parameter_shards import AsyncShard, Sgd, SyncShard, Vector
from tests.programs.conftest import WITHIN_S, Delivered, Once

STEPS, WORKERS, SERVERS = 12, 2, 2


class Tally(Sgd):
    """In place of descent: counts for each parameter how many gradients have changed it."""

    def step(self, parameters: Vector, velocity: Vector, gradient: Vector) -> tuple[Vector, Vector]:
        return parameters + (gradient != 0), velocity


@dataclasses.dataclass
class Marks:
    """Each step of each worker has a parameter of its own on every server; the evaluator fails once, half-way.

    A gradient depends on the parameters it is computed from, as every gradient does, so that only the right ones in the
    right order end with the same bits.
    """

    once: Once

    def initial_parameters(self) -> Vector:
        return np.zeros(SERVERS * STEPS * WORKERS)

    def gradient(self, parameters: Vector, step: int, rank: int) -> Vector:
        gradient = np.zeros((SERVERS, STEPS * WORKERS))
        gradient[:, step * WORKERS + rank] = 1 + np.abs(parameters).sum() / 3
        return gradient.ravel()

    def evaluate(self, parameters: Vector) -> dict[str, float]:
        if np.count_nonzero(parameters) >= SERVERS * STEPS * WORKERS // 2 and self.once():
            raise RuntimeError("the evaluator fails half-way")
        return {}


@pytest.fixture
def never(tmp_path: Path) -> Once:
    spent = Once(tmp_path / "never")
    spent()
    return spent


def trained(once: Once, delivered: Delivered, mode: str, run_dir: Path, kind: str, sgd: Sgd) -> TrainingResult:
    program = parameter_server(
        Marks(once),
        num_workers=WORKERS,
        steps=STEPS,
        on_result=delivered,
        mode=kind,
        num_servers=SERVERS,
        sgd=sgd,
        evaluations=6,
    )
    result: TrainingResult = delivered.of(program, mode, run_dir=run_dir)
    return result


# In processes it is shown every day by tests/integration/test_chaos.py.
in_all_modes = pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])


@pytest.mark.usefixtures("no_leaks")
@in_all_modes
def test_synchronous_training_that_failed_is_resumed_and_ends_with_the_same_bits(
    mode: str, delivered: Delivered, once: Once, never: Once, tmp_path: Path
) -> None:
    undisturbed = trained(never, delivered, "thread", tmp_path / "whole", "sync", Sgd())
    with pytest.raises(lp.NodeError, match="the evaluator fails half-way"):
        trained(once, delivered, mode, tmp_path / "run", "sync", Sgd())
    assert len(checkpoints_in(tmp_path / "run" / "checkpoints")) == 3
    resumed = trained(once, delivered, mode, tmp_path / "run", "sync", Sgd())
    assert resumed.sha256 == undisturbed.sha256
    assert resumed.updates == undisturbed.updates == [[STEPS] * WORKERS] * SERVERS


@pytest.mark.usefixtures("no_leaks")
@in_all_modes
def test_an_asynchronous_run_that_failed_and_is_resumed_loses_no_update_and_applies_none_twice(
    mode: str, delivered: Delivered, once: Once, tmp_path: Path
) -> None:
    with pytest.raises(lp.NodeError, match="the evaluator fails half-way"):
        trained(once, delivered, mode, tmp_path / "run", "async", Tally())
    resumed = trained(once, delivered, mode, tmp_path / "run", "async", Tally())
    assert resumed.parameters.tolist() == [1.0] * (SERVERS * STEPS * WORKERS)
    assert resumed.updates == [[STEPS] * WORKERS] * SERVERS


@pytest.mark.usefixtures("no_leaks")
def test_a_run_that_was_done_delivers_its_result_again(delivered: Delivered, never: Once, tmp_path: Path) -> None:
    results = [trained(never, delivered, "thread", tmp_path / "run", "sync", Sgd()) for _ in range(2)]
    assert results[0].sha256 == results[1].sha256


@pytest.mark.usefixtures("no_leaks")
def test_a_checkpoint_of_another_number_of_servers_is_refused(
    delivered: Delivered, never: Once, tmp_path: Path
) -> None:
    trained(never, delivered, "thread", tmp_path / "run", "sync", Sgd())
    program = parameter_server(Marks(never), num_workers=WORKERS, steps=STEPS, on_result=print)
    with pytest.raises(lp.NodeError, match="is of 2 servers, this program has 1: resume it with num_servers=2"):
        lp.launch(program, "thread", run_dir=tmp_path / "run").wait(WITHIN_S)


# --- Shards, without a program around them ---


@pytest.fixture
def in_a_node(no_leaks: None) -> Any:
    def run(function: Any) -> None:
        program = lp.Program("shards")
        program.add_node(lp.PyNode(lambda: asyncio.run(function())), label="node")
        lp.launch(program, "thread").wait(WITHIN_S)

    return run


def test_workers_wait_for_a_shard_to_be_opened_and_begin_where_its_state_is(in_a_node: Any) -> None:
    async def body() -> None:
        before = SyncShard(np.zeros(1), 1, Sgd(1.0, 0.5), cuts=[2])
        for step in range(2):
            await before.push(0, step, step, np.ones(1))
        state = await before.take(2)
        after = SyncShard(np.zeros(1), 1, Sgd(1.0, 0.5), is_open=False)
        begins_at = asyncio.create_task(after.next_step(0))
        await asyncio.sleep(0)
        assert not begins_at.done()
        assert state is not None
        await after.load_state(state)
        await after.open()
        assert await begins_at == 2
        ends = [await shard.push(0, 2, 2, np.ones(1)) for shard in (before, after)]
        assert ends[0] == ends[1]

    in_a_node(body)


def test_workers_wait_when_nobody_takes_the_states_that_are_kept(in_a_node: Any) -> None:
    async def body() -> None:
        shard = AsyncShard(np.zeros(1), 1, Sgd(1.0, 0.0), cuts=[1, 2, 3])
        for step in range(2):
            await shard.push(0, step, step, np.ones(1))
        third = asyncio.create_task(shard.push(0, 2, 2, np.ones(1)))
        await asyncio.sleep(0)
        assert not third.done()
        state = await shard.take(1)
        assert state is not None and state.snapshot.parameters.tolist() == [-1.0]
        newest = await third
        assert newest is not None and newest.version == 3

    in_a_node(body)
