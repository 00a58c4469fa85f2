"""A training with a stateful feeder and a counter, which nothing calls most of the time: what chaos strikes.

    lp_pipe launch benchmarks/stateful.py -- --steps=60 --pause_ms=50

The feeder is a stream that cannot begin anywhere, and both nodes take part in the checkpoints. Between two steps the
trainer pauses: a node that dies then and is started again has its initial state, and no call has failed. The sha256 is
over the weights, what was counted, and the position of the stream.
"""

import hashlib
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.programs.options import option, parse_options

_KEPT_BATCHES = 4


@dataclass(frozen=True)
class Options:
    """Train on a stream, and count."""

    steps: int = option(60, "steps of training", at_least=1)
    save_every: int = option(7, "steps between two checkpoints", at_least=1)
    pause_ms: float = option(50.0, "milliseconds between two steps in which no node is called")
    seed: int = option(0, "decides weights and batches", at_least=0)


class Stream:
    """A feeder whose next batch follows from the last one only."""

    def __init__(self, seed: int) -> None:
        self._lock, self._generator = threading.Lock(), torch.Generator().manual_seed(seed)
        self._recent: dict[int, tuple[Tensor, Tensor]] = {}

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        with self._lock:
            if step not in self._recent:
                x = torch.randn(16, 32, generator=self._generator)
                self._recent[step] = x, x.roll(1, 1).tanh()
                self._recent.pop(step - _KEPT_BATCHES, None)
            return self._recent[step]

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {"generator": self._generator.get_state(), "recent": dict(self._recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            self._generator.set_state(state["generator"])
            self._recent = dict(state["recent"])


class Counter:
    """Adds up what it is told after each step."""

    def __init__(self) -> None:
        self._total = 0.0

    def add(self, number: float) -> None:
        self._total += number

    def state_dict(self) -> float:
        return self._total

    def load_state_dict(self, state: float) -> None:
        self._total = state


def train(options: Options, pipeline: pp.PipelineClient, stream: Any, counter: Any) -> None:
    checkpoints = Checkpoints({"pipeline": pipeline, "stream": stream, "counter": counter})
    for result in checkpoints.steps(pipeline, options.steps, save_every=options.save_every):
        counter.add(result.loss)
        time.sleep(options.pause_ms / 1e3)
    outcome = f"{pipeline.fingerprint()} {counter.state_dict()} {stream.batch(options.steps)[0].tolist()}"
    print(f"parameters sha256 {hashlib.sha256(outcome.encode()).hexdigest()}", flush=True)
    lp.stop()


def make_program() -> lp.Program:
    """The program that the flags ask for."""
    options = parse_options(Options, "benchmarks/stateful.py")
    layers = [pp.Layer(nn.Linear, 32, 64), pp.Layer(nn.Dropout, 0.1), pp.Layer(nn.Tanh), pp.Layer(nn.Linear, 64, 32)]
    model = pp.Model(layers, nn.functional.mse_loss, torch.optim.Adam, seed=options.seed)
    program = lp.Program("stateful")
    with program.group("stream", on_failure="restart"):
        stream = program.add_node(lp.CourierNode(Stream, options.seed))
    pipeline = pp.add_pipeline(program, model, stages=2, microbatches=2, inputs=stream, on_failure="restart")
    with program.group("counter", on_failure="restart"):
        counter = program.add_node(lp.CourierNode(Counter))
    with program.group("trainer", on_failure="restart"):
        program.add_node(lp.PyNode(train, options, pipeline, stream, counter))
    return program
