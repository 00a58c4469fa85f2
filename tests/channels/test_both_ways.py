"""Two stages that send to each other at once, and receive only afterwards, as neighbours in a schedule do."""

import threading

import torch

from lp_pipe.channels import Receiver, Sender, open_sender
from tests.channels.edges import PATIENCE_S, Edge, assert_same, in_thread

COUNT = 3
NUMBERS = 2_000_000  # more than any buffer on the way holds


def exchange(sender: Sender, receiver: Receiver, own: float, begin: threading.Barrier) -> list[torch.Tensor]:
    begin.wait(PATIENCE_S)
    for number in range(COUNT):
        sender.send(0, torch.full((NUMBERS,), own + number))
    return [receiver.receive(0, PATIENCE_S) for _ in range(COUNT)]


def test_both_ends_send_large_values_at_once(edge: Edge) -> None:
    there, back = (edge.hub.receiver(name, credits=COUNT) for name in ("there", "back"))
    to_there, to_back = (open_sender(edge.hub.endpoint, name, kind=edge.kind) for name in ("there", "back"))
    begin = threading.Barrier(2)
    first = in_thread(exchange, to_there, back, 0.0, begin)
    second = in_thread(exchange, to_back, there, 10.0, begin)
    for number, (from_second, from_first) in enumerate(
        zip(first.result(PATIENCE_S), second.result(PATIENCE_S), strict=True)
    ):
        assert_same(from_second, torch.full((NUMBERS,), 10.0 + number))
        assert_same(from_first, torch.full((NUMBERS,), 0.0 + number))
