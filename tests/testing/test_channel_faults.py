"""Faults on channels of tensors, between two real nodes, in every mode."""

from concurrent.futures import Future
from types import ModuleType
from typing import Any

import pytest
import torch

import lp_pipe as lp
from lp_pipe.channels import ChannelHub
from lp_pipe.launched import services_for
from lp_pipe.pipeline.worker.channel_handle import ChannelHandle, ChannelTarget
from lp_pipe.testing.plugin import Launched

SOON_S = 0.3
PATIENCE_S = 20.0
SIZE = 100_000  # shared memory in process mode


class Receiving:
    """Owns a hub beside its server, as stage workers do."""

    def __init__(self, address: lp.Address) -> None:
        services = services_for(address.id)
        assert services is not None
        hub = ChannelHub(services.endpoint_for(address.id), "receiver/0")
        services.register(address.id, hub.endpoint)
        lp.context().exit_stack.callback(hub.close, "the node has ended")
        self._receiver = hub.receiver("values", credits=2)

    def receive(self, tag: int, timeout: float) -> float:
        return float(self._receiver.receive(tag, timeout)[-1])


class Sending:
    def __init__(self, target: ChannelTarget) -> None:
        self._sender = target.open("values", kind="auto", name="sender/0")

    def send(self, tag: int, value: float) -> None:
        self._sender.send(tag, torch.full((SIZE,), value))

    def send_numbers(self, count: int) -> None:
        for number in range(count):
            self.send(number, number)


@pytest.fixture
def without_torch() -> None:
    """Let templates preload torch, which both nodes need."""


@pytest.fixture
def no_leaks(warm_template: None, no_leaks: None) -> None:
    """As for all tests, but with a template that was there before the test."""


@pytest.fixture
def run(mode: str, launched: Launched, faults: ModuleType) -> lp.Run:
    program = lp.Program("channel")
    address = lp.Address()
    node = lp.CourierNode(Receiving, address)
    address.assign(node)
    program.add_node(node, label="receiver")
    program.add_node(lp.CourierNode(Sending, ChannelHandle(address, "receiver/0")), label="sender")
    return launched(program, mode)


def is_waiting(future: "Future[Any]") -> bool:
    try:
        future.exception(SOON_S)
    except TimeoutError:
        return True
    return False


def test_a_value_is_lost_and_those_after_it_arrive(run: lp.Run, faults: ModuleType) -> None:
    sender, receiver = run.client("sender"), run.client("receiver")
    with faults.drop(run, "sender", "receiver", count=3) as fault:  # more than there are credits: they come back
        sending = sender.futures.send_numbers(5)
        assert receiver.receive(3, PATIENCE_S) == 3
        assert receiver.receive(4, PATIENCE_S) == 4
        sending.result(PATIENCE_S)
        assert fault.hits == 3


def test_who_waits_for_a_lost_value_waits(run: lp.Run, faults: ModuleType) -> None:
    sender, receiver = run.client("sender"), run.client("receiver")
    with faults.drop(run, "sender", "receiver"):
        sender.send(0, 0)
        with pytest.raises(TimeoutError, match="nothing with tag 0 came"):
            receiver.receive(0, SOON_S)


def test_values_come_late(run: lp.Run, faults: ModuleType) -> None:
    sender, receiver = run.client("sender"), run.client("receiver")
    with faults.delay(run, "sender", "receiver", 3 * SOON_S):
        sender.send(0, 1)
        pending = receiver.futures.receive(0, PATIENCE_S)
        assert is_waiting(pending)
    assert pending.result(PATIENCE_S) == 1


def test_late_credits_hold_the_sender_back(run: lp.Run, faults: ModuleType) -> None:
    sender, receiver = run.client("sender"), run.client("receiver")
    with faults.delay(run, "receiver", "sender", 3 * SOON_S):
        sender.send(0, 0)
        sender.send(0, 1)
        third = sender.futures.send(0, 2)
        assert [receiver.receive(0, PATIENCE_S) for _ in range(2)] == [0, 1]
        assert is_waiting(third)
        third.result(PATIENCE_S)


def test_a_cut_channel_is_closed_at_both_ends(run: lp.Run, faults: ModuleType) -> None:
    sender, receiver = run.client("sender"), run.client("receiver")
    pending = receiver.futures.receive(0, PATIENCE_S)
    assert faults.cut(run, "sender", "receiver") == 1
    with pytest.raises(lp.RemoteError, match="the test has cut the connection"):
        pending.result(PATIENCE_S)
    with pytest.raises(lp.RemoteError, match="the test has cut the connection"):
        sender.send(0, 0)
