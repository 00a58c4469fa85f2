"""Waiting for a GPU's stream on the host; the stream's events are stand-ins here."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from lp_pipe.channels import gpu

LONG = timedelta(seconds=30)


class Event:
    """Done when it was asked `asked` times."""

    def __init__(self, asked: int) -> None:
        self._left = asked

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        self._left -= 1
        return self._left < 0


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> Callable[..., gpu.QueuedGpuWork]:
    def make(asked: int, failure: Callable[[], str | None] = lambda: None) -> gpu.QueuedGpuWork:
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(asked))
        stream: Any = None
        return gpu.QueuedGpuWork(stream, failure)

    return make


def test_a_wait_ends_when_the_stream_is_done(queued: Callable[..., gpu.QueuedGpuWork]) -> None:
    queued(0).wait(timedelta())
    queued(5).wait(LONG)


def test_a_wait_ends_when_the_peer_is_gone(queued: Callable[..., gpu.QueuedGpuWork]) -> None:
    """The kernel that waits for its bytes never ends by itself."""
    reasons = iter([None, None, "the sender is gone"])
    with pytest.raises(RuntimeError, match="the sender is gone"):
        queued(10**9, lambda: next(reasons)).wait(LONG)


def test_what_an_abort_has_ended_has_not_arrived(queued: Callable[..., gpu.QueuedGpuWork]) -> None:
    with pytest.raises(RuntimeError, match="aborted"):
        queued(0, lambda: "aborted").wait(LONG)


def test_a_wait_has_a_limit(queued: Callable[..., gpu.QueuedGpuWork]) -> None:
    with pytest.raises(RuntimeError, match=r"0\.01 s"):
        queued(10**9).wait(timedelta(seconds=0.01))
