"""Two stages that send to each other at once, and receive only afterwards, as neighbours in a schedule do."""

import threading
from typing import Any

import torch

from lp_pipe.channels import Receiver, Sender, open_sender
from tests.channels.edges import PATIENCE_S, Edge, assert_same, in_thread

COUNT = 3
NUMBERS = 2_000_000  # more than any buffer on the way holds


def exchange(sender: Sender, receiver: Receiver, own: list[Any], begin: threading.Barrier) -> list[Any]:
    begin.wait(PATIENCE_S)
    for value in own:
        sender.send(0, value)
    return [receiver.receive(0, PATIENCE_S) for _ in own]


def both_exchange(edge: Edge, firsts: list[Any], seconds: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return what the second and the first end have received after both have sent before they received."""
    there, back = (edge.hub.receiver(name, credits=COUNT) for name in ("there", "back"))
    to_there, to_back = (open_sender(edge.hub.endpoint, name, kind=edge.kind) for name in ("there", "back"))
    begin = threading.Barrier(2)
    first = in_thread(exchange, to_there, back, firsts, begin)
    second = in_thread(exchange, to_back, there, seconds, begin)
    return first.result(PATIENCE_S), second.result(PATIENCE_S)


def test_both_ends_send_large_values_at_once(edge: Edge) -> None:
    firsts, seconds = ([torch.full((NUMBERS,), own + i) for i in range(COUNT)] for own in (0.0, 10.0))
    for got, sent in zip(both_exchange(edge, firsts, seconds), (seconds, firsts), strict=True):
        for one, other in zip(got, sent, strict=True):
            assert_same(one, other)


def test_both_ends_send_large_values_that_are_no_tensors_at_once(edge: Edge) -> None:
    """Regression: with shared memory each stage sent by itself, and waited for the other one to read, for ever."""
    firsts, seconds = ([(torch.ones(2), f"{own}{i}" * NUMBERS) for i in range(COUNT)] for own in "ab")
    for got, sent in zip(both_exchange(edge, firsts, seconds), (seconds, firsts), strict=True):
        assert [text for _, text in got] == [text for _, text in sent]
