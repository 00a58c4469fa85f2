"""torch.distributed.pipelining over gloo, on stages that sleep: a process for each rank."""

import multiprocessing
import pathlib
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from benchmarks.sleeping import Sleeper, Slept, Start, batch, mean, slept

# torch's names for our schedules. Its zero bubbles but ZBV need several stages a rank, so zb_h1 has none.
SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}
_PATIENCE_S = 60.0


class RankSteps(NamedTuple):
    """The figures of a rank: when each step began and ended (time.monotonic), and the sleep of its stages."""

    steps: list[tuple[float, float]]
    slept: dict[int, Slept]


def run(
    schedule: str,
    placement: tuple[int, ...],
    sleep_s: float,
    microbatches: int,
    steps: int,
    store: str,
) -> list[RankSteps]:
    """Train some steps after one to warm up. placement: which rank each virtual stage is on.

    sleep_s: for each of a virtual stage's F, I and W. store: a path that does not exist yet, as others that begin
    with it.

    Raises:
        RuntimeError: a rank has ended, or takes too long; its error is on stderr.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(max(placement) + 1):
        near, far = spawn.Pipe()
        arguments = (rank, schedule, placement, sleep_s, microbatches, steps, store, far)
        processes.append(spawn.Process(target=_rank_main, args=arguments))
        processes[-1].start()
        far.close()
        pipes.append(near)
    patience_s = _PATIENCE_S + 10 * (steps + 1) * microbatches * sleep_s * len(placement)
    try:
        return [_answer(pipe, rank, patience_s) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(pipe: Connection, rank: int, patience_s: float) -> RankSteps:
    try:
        if not pipe.poll(patience_s):
            raise RuntimeError(f"torch's rank {rank} took more than {patience_s:.0f} s")
        answer: RankSteps = pipe.recv()
    except EOFError as error:
        raise RuntimeError(f"torch's rank {rank} has ended; its error is above") from error
    return answer


def _rank_main(
    rank: int,
    schedule: str,
    placement: tuple[int, ...],
    sleep_s: float,
    microbatches: int,
    steps: int,
    store: str,
    answer: Connection,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=max(placement) + 1)
    own = [stage for stage, owner in enumerate(placement) if owner == rank]
    records = {stage: pathlib.Path(f"{store}.{stage}") for stage in own}
    modules = {stage: _layers(stage, sleep_s, records[stage]) for stage in own}
    cpu = torch.device("cpu")
    stages = [pipelining.PipelineStage(modules[stage], stage, len(placement), cpu) for stage in own]
    is_single = schedule in ("gpipe", "1f1b")
    runner = SCHEDULES[schedule](stages[0] if is_single else stages, microbatches, loss_fn=mean)
    inputs, targets = batch(microbatches)
    positional = (inputs,) if 0 in own else ()
    keywords: dict[str, Tensor] = {"target": targets} if len(placement) - 1 in own else {}
    times: list[tuple[float, float]] = []
    for index in range(steps + 1):
        if index == 1:
            before = {stage: slept(records[stage]) for stage in own}
        dist.barrier()
        start = time.monotonic()
        runner.step(*positional, **keywords)
        times.append((start, time.monotonic()))
    in_steps = {stage: slept(records[stage]).since(before[stage]) for stage in own}
    answer.send(RankSteps(times[1:], in_steps))
    answer.recv()  # the parent's end: gloo's other ranks may still talk to this one


def _layers(stage: int, sleep_s: float, record: pathlib.Path) -> nn.Sequential:
    start = [] if stage else [Start()]
    return nn.Sequential(*start, Sleeper(sleep_s, record))
