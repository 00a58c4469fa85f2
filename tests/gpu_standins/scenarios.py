"""What stages with stand-in GPUs do in tests of channels; each function runs in a process of its own."""

import os
import threading
import time
from typing import Any

import torch

from lp_pipe.cli import gpu_checks
from lp_pipe.errors import ChannelClosed
from tests.gpu_standins import fake_gpu
from tests.gpu_standins.processes import DEVICE, PATIENCE_S, FakeStage, threads_named

LARGE = 200_000  # 1.6 MB, of which the stand-in for NCCL buffers 1 MiB
PROMPT_S = 5.0


def on_gpu(size: int, value: float = 1.5) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.float64)


def ways_of(stage: FakeStage) -> list[bool]:
    """Return for each sender whether its GPU transport is used."""
    return [sender.keeps_on_gpu for sender in stage.senders]


def echo(stage: FakeStage) -> str:
    receiver, sender = stage.receiver("there"), stage.sender("back", "a")
    try:
        while True:
            sender.send(0, receiver.receive(0))
    except ChannelClosed:
        stage.close()
        return "closed"


def exchange(stage: FakeStage) -> list[bool]:
    """Send values of all sizes to the echo, then what a slow kernel still computes and what is overwritten at once."""
    receiver, sender = stage.receiver("back"), stage.sender("there", "b")
    for size in (3, 100_000, LARGE, 0, 7):
        sender.send(0, (on_gpu(size), torch.arange(3), "leaf"))
        got, on_host, leaf = receiver.receive(0, PATIENCE_S)
        assert torch.equal(got, on_gpu(size)) and on_host.tolist() == [0, 1, 2] and leaf == "leaf", size
    for number in range(1, 7):
        x = on_gpu(50_000, 0.0)
        fake_gpu.compute(0.02, x, number)
        sender.send(0, x)
        fake_gpu.compute(0.0, x, -1)
        got = receiver.receive(0, PATIENCE_S)
        assert bool((got == number).all()), number
        stage.say(number)
    ways = ways_of(stage)
    stage.close()
    return ways


SIZES = (3, LARGE, 5)


def send_sizes(stage: FakeStage) -> None:
    sender = stage.sender("there", "b")
    for size in SIZES:
        sender.send(0, on_gpu(size, 2.0))
    assert sender.keeps_on_gpu
    stage.close()


def receive_sizes(stage: FakeStage) -> list[float]:
    receiver = stage.receiver("there")
    return [float(receiver.receive(0, PATIENCE_S).sum()) for _ in SIZES]


def doctor(stage: FakeStage) -> bool:
    """Do what `lp_pipe doctor --gpu` does in its first process."""
    return gpu_checks.carry(stage.directory, stage.kind, DEVICE, on_gpu(1000)).stays_on_gpu


def doctors_peer(stage: FakeStage) -> None:
    gpu_checks.answer(stage.directory, stage.kind, str(DEVICE))


ROUNDS = 6


def burst(stage: FakeStage) -> str:
    """Queue several large sends, in both stages, within less time than a header takes to be acted on."""
    is_first = stage.name == "a"
    receiver = stage.receiver("back" if is_first else "there")
    sender = stage.sender(*(("there", "b") if is_first else ("back", "a")))
    for number in range(ROUNDS):
        for part in range(3):
            sender.send(0, on_gpu(LARGE, number + part))
        for part in range(3):
            assert bool((receiver.receive(0, PATIENCE_S) == number + part).all())
    stage.say("done")
    stage.hear()
    stage.close()
    return "done"


def slow_producer(stage: FakeStage) -> None:
    """Send what takes a minute to compute."""
    receiver, sender = stage.receiver("there"), stage.sender("back", "a")
    sender.send(0, receiver.receive(0))
    fake_gpu.compute(60)
    sender.send(0, on_gpu(1000))
    stage.say("sent")
    stage.hear()


def wait_for_killed(stage: FakeStage) -> dict[str, Any]:
    """Wait for a value whose sender is killed; then return what was raised, when, and what is left."""
    receiver, sender = stage.receiver("back"), stage.sender("there", "b")
    sender.send(0, on_gpu(3))
    receiver.receive(0, PATIENCE_S)
    stage.say("waiting")
    try:
        receiver.receive(0, PATIENCE_S)
    except ChannelClosed as error:
        raised = str(error)
    began = time.monotonic()
    stage.close()
    left = threads_named("connect", "abort", "receive", "send")
    return {"raised": raised, "left": left, "took_s": time.monotonic() - began}


def send_to_killed(stage: FakeStage) -> dict[str, Any]:
    """Send until the receiver is killed; then return what is left."""
    receiver, sender = stage.receiver("back"), stage.sender("there", "b")
    for _ in range(3):
        sender.send(0, on_gpu(LARGE))
        receiver.receive(0, PATIENCE_S)
    stage.say(ways_of(stage))
    try:
        while True:
            sender.send(0, on_gpu(LARGE))
    except ChannelClosed as error:
        raised = str(error)
    stage.close()
    give_up_at = time.monotonic() + PROMPT_S
    while fake_gpu.uses_of_shared_memory() and time.monotonic() < give_up_at:
        time.sleep(0.01)
    left = threads_named("connect", "abort", "receive", "send")
    return {"raised": raised, "left": left, "uses": fake_gpu.uses_of_shared_memory()}


def die_while_connecting(stage: FakeStage) -> None:
    """Join no communicator, though the notes say so, until this process is killed."""
    from lp_pipe.channels import libnccl

    def never(*_: Any) -> None:
        stage.say("in init")
        time.sleep(PATIENCE_S)

    libnccl.init = never
    stage.sender("back", "a")
    stage.hear()


def wait_for_connection(stage: FakeStage) -> dict[str, Any]:
    receiver = stage.receiver("back")
    stage.say("waiting")
    try:
        receiver.receive(0, PATIENCE_S)
    except ChannelClosed as error:
        raised = str(error)
    stage.close()
    return {"raised": raised, "left": threads_named("connect", "abort")}


CHANNELS = 36


def many_channels(stage: FakeStage) -> str:
    """Send and receive on many channels at once, from a thread each."""
    other = "b" if stage.name == "a" else "a"
    receivers = [stage.receiver(f"{other}-{number}") for number in range(CHANNELS)]
    senders = [stage.sender(f"{stage.name}-{number}", other) for number in range(CHANNELS)]
    wrong: list[int] = []

    def work(number: int) -> None:
        for step in range(3):
            senders[number].send(step, on_gpu(1000, number + step))
            if not bool((receivers[number].receive(step, PATIENCE_S) == number + step).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(CHANNELS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    stage.say("done")
    stage.hear()
    stage.close()
    return f"wrong: {wrong}"


# A ring of three stages on two GPUs: a and c share one. Each has another communicator before that between c and a.
RING = {"a": ("s:a-b", "r:c-a"), "b": ("r:a-b", "s:b-c"), "c": ("r:b-c", "s:c-a")}


def ring(stage: FakeStage) -> list[str]:
    os.environ.pop("NCCL_HOSTID", None)
    told = []
    receivers = {what[2:]: stage.receiver(what[2:]) for what in RING[stage.name] if what[0] == "r"}
    for what in RING[stage.name]:
        channel = what[2:]
        try:
            if what[0] == "r":
                told.append(str(receivers[channel].receive(0, PATIENCE_S).tolist()))
            else:
                stage.sender(channel, channel[-1]).send(0, on_gpu(2))
        except ChannelClosed as error:
            told.append(str(error))
    stage.say("done")
    stage.hear()
    stage.close()
    return told
