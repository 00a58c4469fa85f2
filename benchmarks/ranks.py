"""Two plain processes that train without lp_pipe: the single loop, torch's pipelining, and the two halves alone.

The parent says over a pipe which party runs next; the others' state waits.
"""

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.workloads import Workload, loss
from lp_pipe.pipeline.schedule import Action, make_schedule

_TORCH_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Timing(NamedTuple):
    """The seconds of each step of a party in one process; its losses, if that process computes them."""

    step_s: list[float]
    optimizer_s: list[float]
    losses: list[float]


class Party(Protocol):
    def run(self, first_step: int, steps: int) -> Timing:
        """Train for some steps."""


class SingleLoop:
    """The loop that everybody would write without a pipeline."""

    def __init__(self, workload: Workload, microbatches: int) -> None:
        self._workload = workload
        self._microbatches = microbatches
        self._model = workload.layers()
        self._optimizer = workload.optimizer(list(self._model.named_parameters()))

    def run(self, first_step: int, steps: int) -> Timing:
        return _timed(self._workload, self._step, range(first_step, first_step + steps))

    def _step(self, inputs: Tensor, targets: Tensor) -> float:
        total = 0.0
        pairs = zip(inputs.chunk(self._microbatches), targets.chunk(self._microbatches), strict=True)
        for x, y in pairs:
            weight = len(x) / len(inputs)
            value = loss(self._model(x), y)
            (value * weight).backward()
            total += value.item() * weight
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total


class TorchPipeline:
    """torch.distributed.pipelining over gloo, as its tutorial has it."""

    def __init__(self, workload: Workload, microbatches: int, schedule: str, rank: int) -> None:
        self._workload = workload
        self._rank = rank
        self._half = workload.half(rank)
        stage = PipelineStage(self._half, rank, 2, torch.device("cpu"))
        self._schedule = _TORCH_SCHEDULES[schedule](stage, microbatches, loss_fn=loss)
        self._optimizer = workload.optimizer(list(self._half.named_parameters()))

    def run(self, first_step: int, steps: int) -> Timing:
        timing = _timed(self._workload, self._step, range(first_step, first_step + steps))
        return timing if self._rank else timing._replace(losses=[])

    def _step(self, inputs: Tensor, targets: Tensor) -> float:
        losses: list[Tensor] = []
        if self._rank == 0:
            self._schedule.step(inputs)
        else:
            self._schedule.step(target=targets, losses=losses)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else 0.0


class LoneHalf:
    """A stage's whole computation without its neighbour, on inputs that are made beforehand.

    Its weights never move (the learning rate is next to nothing), or the made-up gradients would lead them astray.
    schedule: whose order of forwards and backwards; None: each backward comes right behind its forward, so that one
    micro-batch's activations are all that is in memory.
    """

    def __init__(self, workload: Workload, microbatches: int, rank: int, schedule: str | None = None) -> None:
        self._half = workload.half(rank)
        alternating = [Action(op, rank, index) for index in range(microbatches) for op in ("F", "B")]
        self._actions = make_schedule(schedule, 2, microbatches).workers[rank] if schedule else alternating
        self._optimizer = workload.optimizer(list(self._half.named_parameters()))
        for group in self._optimizer.param_groups:
            group["lr"] = 1e-12
        inputs, targets = workload.batch(0)
        self._inputs, self._targets = inputs.chunk(microbatches), targets.chunk(microbatches)
        if rank:
            with torch.no_grad():
                self._inputs = tuple(workload.half(0)(x).detach() for x in self._inputs)
        self._computes_loss = bool(rank)
        self._gradients: list[Tensor] = []  # of the outputs, where no loss is computed

    def run(self, first_step: int, steps: int) -> Timing:
        times = [self._step() for _ in range(steps)]
        return Timing([step_s for step_s, _ in times], [optimizer_s for _, optimizer_s in times], [])

    def _step(self) -> tuple[float, float]:
        """All micro-batches, then the optimizer; returns the seconds of both together and of the optimizer."""
        start = time.monotonic()
        outputs: dict[int, Tensor] = {}
        for op, _, index in self._actions:
            if op == "F":
                outputs[index] = self._forward(index)
            else:
                outputs.pop(index).backward(None if self._computes_loss else self._gradients[index])
        computed = time.monotonic()
        self._optimizer.step()
        self._optimizer.zero_grad()
        end = time.monotonic()
        return end - start, end - computed

    def _forward(self, index: int) -> Tensor:
        x = self._inputs[index]
        if self._computes_loss:
            # A copy, as each micro-batch is new memory that somebody has just written in a real pipeline too.
            output: Tensor = self._half(x.clone().requires_grad_())
            return loss(output, self._targets[index]) / len(self._targets)
        output = self._half(x)
        if not self._gradients:
            self._gradients = [torch.randn_like(output) * 1e-4 for _ in self._inputs]
        return output


def _timed(workload: Workload, step: Callable[[Tensor, Tensor], float], indices: range) -> Timing:
    losses, step_s = [], []
    for index in indices:
        start = time.monotonic()
        losses.append(step(*workload.batch(index)))
        step_s.append(time.monotonic() - start)
    return Timing(step_s, [], losses)


class Ranks:
    """The parent's end of both processes."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def run(self, party: str, first_step: int, steps: int) -> list[Timing]:
        """Let both ranks run their share of a party at the same time; the single loop is rank 0's alone."""
        chosen = self._pipes[:1] if party == "single" else self._pipes
        for pipe in chosen:
            pipe.send((party, first_step, steps))
        return [pipe.recv() for pipe in chosen]


@contextlib.contextmanager
def two_ranks(workload: Workload, microbatches: int, schedules: list[str], store: str) -> Iterator[Ranks]:
    """Start both processes, with 1 thread each.

    store: a path that does not exist yet, for gloo's rendezvous.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in (0, 1):
        near, far = spawn.Pipe()
        arguments = (rank, store, workload, microbatches, schedules, far)
        processes.append(spawn.Process(target=_rank_main, args=arguments, name=f"rank {rank}"))
        pipes.append(near)
        processes[-1].start()
        far.close()  # so that a rank that dies ends the parent's waiting
    try:
        yield Ranks(pipes)
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(20)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank_main(
    rank: int, store: str, workload: Workload, microbatches: int, schedules: list[str], commands: Connection
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parties: dict[str, Party] = {"single": SingleLoop(workload, microbatches)} if rank == 0 else {}
    parties["halves"] = LoneHalf(workload, microbatches, rank)
    for schedule in schedules:
        parties[f"halves/{schedule}"] = LoneHalf(workload, microbatches, rank, schedule)
        parties[f"torch/{schedule}"] = TorchPipeline(workload, microbatches, schedule, rank)
    while (command := commands.recv()) is not None:
        party, first_step, steps = command
        commands.send(parties[party].run(first_step, steps))
    dist.destroy_process_group()
