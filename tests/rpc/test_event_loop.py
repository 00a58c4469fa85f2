"""lp_pipe/rpc/event_loop.py"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from lp_pipe.rpc.event_loop import LoopCall, LoopThread

WITHIN_S = 10


class Told:
    """A stand-in for an Answer that records what the caller was told."""

    def __init__(self) -> None:
        self.is_cancelled = threading.Event()

    def cancelled(self) -> None:
        self.is_cancelled.set()


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def count_for_ever() -> AsyncIterator[int]:
    await asyncio.Event().wait()
    yield 0


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    thread = LoopThread("async calls", None)
    yield thread.loop
    thread.close()


@pytest.mark.parametrize("handler", [wait_for_ever, count_for_ever], ids=lambda handler: handler.__name__)
def test_a_call_that_is_cancelled_before_it_begins_does_not_begin(
    loop: asyncio.AbstractEventLoop, handler: Any
) -> None:
    """Regression: the handler ran until the server's end though its caller had gone before its first step."""
    told: Any = Told()
    call = LoopCall(loop, told)
    call.cancel()
    call.start(handler())
    assert told.is_cancelled.wait(WITHIN_S)
