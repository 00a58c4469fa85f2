"""A channel whose two ends are in one process, and threads that wait for it."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from lp_pipe.channels import ChannelHub, Receiver, Sender, kinds, open_sender

PATIENCE_S = 10.0
_A_MOMENT_S = 0.05  # long enough for a thread that is not blocked to go on

_numbers = itertools.count()


class Edge:
    """Stage 0's sender and stage 1's receiver, in one process."""

    def __init__(self, kind: str, directory: str) -> None:
        usual = f"inproc:hub{next(_numbers)}" if kind == "inproc" else f"unix:{directory}/s"
        endpoint = "tls:127.0.0.1:0" if kind == "tls" else kinds.named(kind).hub_endpoint(usual)
        self.kind = kind
        self.hub = ChannelHub(endpoint, "stages/1")

    def receiver(self, credits: int = 4) -> Receiver:
        return self.hub.receiver("activations", credits)

    def sender(self) -> Sender:
        return open_sender(self.hub.endpoint, "activations", kind=self.kind, name="stages/0", peer="stages/1")


def in_thread(function: Callable[..., Any], *args: Any) -> "Future[Any]":
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def is_blocked(future: "Future[Any]") -> bool:
    try:
        future.exception(_A_MOMENT_S)
    except TimeoutError:
        return True
    return False


def assert_same(got: Any, sent: Any) -> None:
    assert got.dtype == sent.dtype and got.shape == sent.shape
    assert torch.equal(got, sent)
