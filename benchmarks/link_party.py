"""A party of two plain processes that train over a link: as a pipeline of two stages, or each on all layers.

    python -m benchmarks.link_party < job

The pipeline is lp_pipe's stages and schedule over its channels with TLS; data parallelism all-reduces with
torch's gloo, after every micro-batch, as the cost model has it. The first line on stdin is the job; the party says on
stdout how far it is, waits for a line on stdin each time, and in the end says how many seconds its steps took.
"""

import base64
import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from benchmarks.sleeping import Sleeper, Start, mean
from lp_pipe.channels import ChannelHub, open_sender
from lp_pipe.connections.credentials import Credentials, use_credentials
from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.layers.message import Message, to_message

PORT = 7000  # the namespaces are new, so it is free


class Job(NamedTuple):
    """The sizes of a model. units: sleeps of each layer; weights: numbers in a parameter; cut: where stage 1 begins."""

    rank: int
    kind: str
    addresses: list[str]
    credentials: str
    units_s: list[float]
    weights: int
    rows: int
    width: int
    microbatches: int
    cut: int
    steps: int


class Weighty(nn.Module):
    """A layer with many parameters that computes next to nothing with them; it sleeps instead."""

    def __init__(self, seconds: float, weights: int) -> None:
        super().__init__()
        self.sleeper = Sleeper(seconds)
        self.weight = nn.Parameter(torch.zeros(weights))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.sleeper(x)
        return y + self.weight[: x.shape[1]]


def layers(units_s: list[float], weights: int) -> list[nn.Module]:
    """Return the whole model, whose first layer also makes its input want a gradient."""
    first = nn.Sequential(Start(), Weighty(units_s[0], weights))
    return [first, *(Weighty(seconds, weights) for seconds in units_s[1:])]


def pipeline_step(job: Job) -> Callable[[int], None]:
    """Run one step of 1F1B; the other stage is at the other end of the link."""
    use_credentials(Credentials.from_bytes(base64.b64decode(job.credentials)))
    hub = ChannelHub(f"tls:{job.addresses[job.rank]}:{PORT}", f"stages/{job.rank}")
    names = ("activations", "gradients")
    receiver = hub.receiver(names[1 - job.rank])
    everything = layers(job.units_s, job.weights)
    own = everything[: job.cut] if job.rank == 0 else everything[job.cut :]
    stage = Stage(job.rank, job.cut * job.rank, own, seed=0)
    actions = pp.make_schedule("1f1b", 2, job.microbatches).workers[job.rank]
    x, target = torch.ones(job.rows, job.width), torch.ones(job.rows, 1)
    _wait_for_the_other()
    sender = open_sender(
        f"tls:{job.addresses[1 - job.rank]}:{PORT}", names[job.rank], kind="tls", name=f"stages/{job.rank}"
    )

    def step(number: int) -> None:
        losses: dict[int, Tensor] = {}
        for op, _, microbatch in actions:
            if op == "F" and job.rank == 0:
                output = stage.forward(Message(x, (False,)), number, microbatch)
                sender.send(microbatch, to_message(output).value)
            elif op == "F":
                output = stage.forward(Message(receiver.receive(microbatch), (True,)), number, microbatch)
                losses[microbatch] = mean(output, target)
            elif job.rank == 0:
                stage.backward(microbatch, [receiver.receive(microbatch)])
            else:
                (gradient,) = stage.backward_from_loss(microbatch, losses.pop(microbatch))
                sender.send(microbatch, gradient)
        stage_parameters = nn.ModuleList(own).parameters()
        for parameter in stage_parameters:
            parameter.grad = None

    return step


def data_parallel_step(job: Job) -> Callable[[int], None]:
    """Run as many micro-batches, half of them here, with an all-reduce after each."""
    model = nn.Sequential(*layers(job.units_s, job.weights))
    x, target = torch.ones(job.rows, job.width), torch.ones(job.rows, 1)
    _wait_for_the_other()
    dist.init_process_group("gloo", f"tcp://{job.addresses[0]}:{PORT + 1}", rank=job.rank, world_size=2)

    def step(number: int) -> None:
        for _ in range(job.microbatches // 2):
            mean(model(x), target).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients if gradient is not None])
            dist.all_reduce(flat)
            model.zero_grad()

    return step


KINDS: dict[str, Callable[[Job], Callable[[int], None]]] = {
    "pipeline": pipeline_step,
    "data parallel": data_parallel_step,
}


def _wait_for_the_other() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def main() -> None:
    torch.set_num_threads(1)
    values: dict[str, Any] = json.loads(sys.stdin.readline())
    job = Job(**values)
    step = KINDS[job.kind](job)
    step(0)
    print("warm", flush=True)
    sys.stdin.readline()
    took = []
    for number in range(1, job.steps + 1):
        started = time.monotonic()
        step(number)
        took.append(time.monotonic() - started)
    print(json.dumps(took), flush=True)
    sys.stdin.readline()  # the parent counts the bytes before the sockets close


if __name__ == "__main__":
    main()
