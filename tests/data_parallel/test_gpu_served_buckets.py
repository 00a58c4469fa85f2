"""Gradients on a GPU are pushed to servers once they are on the host, while this process goes on; stand-ins show it."""

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lp_pipe.collectives.backend import GenerationOver
from lp_pipe.collectives.compression import Fp16
from lp_pipe.collectives.push_pull import PushPull, PushPullOptions
from lp_pipe.collectives.sum_server import SumServer
from lp_pipe.data_parallel import buckets, served_buckets
from lp_pipe.data_parallel.exchange import Exchange
from lp_pipe.membership import Membership
from tests.waiting import until

LAYERS = 4


class GpuTensor(Tensor):
    """A tensor that is on a GPU, as far as anybody asks. Copies to the host and back wait in `gpu`'s streams."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not Tensor.copy_ or not kwargs:
            return super().__torch_function__(function, types, args, kwargs or {})
        into, given = (one.as_subclass(Tensor) for one in args)
        gpu.current().queue(lambda: into.copy_(given))
        return args[0]


class Stream:
    """A stream whose work is done when the test lets it."""

    def __init__(self, *_: Any) -> None:
        self._waiting: list[Callable[[], Any]] = []
        self._queued = self._done = 0

    def queue(self, work: Callable[[], Any]) -> None:
        self._waiting.append(work)
        self._queued += 1
        if self is gpu.main:
            self.run()

    def run(self) -> None:
        for work in self._waiting:
            work()
            self._done += 1
        self._waiting.clear()

    def record(self) -> "Event":
        return Event(self, self._queued)

    def has_done(self, count: int) -> bool:
        return self._done >= count

    def wait_event(self, event: "Event") -> None:
        self.queue(lambda: event.is_due() or pytest.fail("work runs before what it waits for"))

    def __enter__(self) -> "Stream":
        gpu.of_thread.stream = self
        gpu.beside.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        gpu.of_thread.stream = gpu.main


class Event:
    def __init__(self, stream: Stream, count: int) -> None:
        self._stream, self._count = stream, count

    def is_due(self) -> bool:
        return self._stream.has_done(self._count)

    query = is_due


class Gpu:
    def __init__(self) -> None:
        self.beside: list[Stream] = []
        self.main = Stream()
        self.of_thread = threading.local()

    def current(self) -> Stream:
        return getattr(self.of_thread, "stream", self.main)

    def run(self) -> None:
        """Do the work that is queued beside the backward."""
        for stream in self.beside:
            stream.run()


gpu = Gpu()


class GpuExchange(Exchange):
    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = torch.empty(numel, dtype=dtype)
        return memory.as_subclass(GpuTensor) if numel > 2 * LAYERS else memory  # the flags are on the host


@pytest.fixture
def push_pull(monkeypatch: Any, tmp_path: Path, request: Any) -> Iterator[PushPull]:
    global gpu
    gpu = Gpu()
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(buckets, "event_now", lambda device: gpu.current().record())
    monkeypatch.setattr(served_buckets, "event_now", lambda device: gpu.current().record())
    monkeypatch.setattr(served_buckets, "empty_on_host", lambda one: torch.full(one.shape, torch.nan))
    server = SumServer(f"unix:{tmp_path}/server", "server")
    membership = Membership("ranks", 0, 0, ("ranks/0",), (uuid.uuid4().bytes,))
    options = PushPullOptions(2048, True, getattr(request, "param", None))
    found = PushPull(membership, [server.endpoint], [1.0], options)
    yield found
    found.close()
    server.close()


def backward_of_two_replicas(push_pull: PushPull) -> tuple[served_buckets.ServedBuckets, nn.Module, list[Tensor]]:
    """Return buckets after the backwards of two hosted replicas, and the sums of their gradients."""
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(LAYERS)])
    own = served_buckets.ServedBuckets(
        list(model.named_parameters()), GpuExchange(None, [2], 0, push_pull), 1024, lambda: [], lambda _: False
    )
    own._expected = dict.fromkeys(range(LAYERS), 1)
    return own, model, backwards(own, model)


def backwards(own: served_buckets.ServedBuckets, model: nn.Module, first_layer: int = 0) -> list[Tensor]:
    """Make a step's backwards of two replicas; return the sums of their gradients."""
    own.begin_step()
    whole: list[Tensor] = []
    for replica in range(2):
        own.select(replica, is_last=True)
        if replica:
            own.open_window(sends_early=True)
        model[first_layer:](torch.full((1, 16), replica + 1.0)).sum().backward()  # type: ignore[index]
        found = [one.grad.as_subclass(Tensor).clone() for one in model.parameters() if one.grad is not None]
        whole = [a + b for a, b in zip(whole, found, strict=True)] if whole else found
    return whole


@pytest.mark.parametrize("push_pull", [None, Fp16()], indirect=True)
def test_gradients_are_pushed_once_they_are_on_the_host(push_pull: PushPull) -> None:
    own, model, expected = backward_of_two_replicas(push_pull)
    sums = dict(own._sums)
    assert len(sums) == LAYERS and not any(one.is_complete for one in sums.values())  # and the backward has not waited
    gpu.run()
    until(lambda: own.summed == LAYERS)
    own.finish()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert isinstance(parameter.grad, GpuTensor)
        torch.testing.assert_close(parameter.grad.as_subclass(Tensor), wanted, rtol=1e-3, atol=1e-3)
    own.close()


def test_late_sums_come_to_the_gpu_when_they_are_waited_for(push_pull: PushPull) -> None:
    own, _, expected = backward_of_two_replicas(push_pull)
    late = own.finish_late()  # waits for the flags only
    assert not any(one.pending.is_complete for one in late)
    gpu.run()
    for one, wanted in zip(late, reversed(expected), strict=True):
        one.pending.wait()
        (gradient,) = one.gradients.values()
        assert torch.equal(gradient.as_subclass(Tensor), wanted)
    own.close()


def test_a_late_sum_is_not_written_over_gradients_of_the_next_step(push_pull: PushPull) -> None:
    """The first layer has a gradient in every second step, so nothing is updated with its first sum, of zeros."""
    own, model, _ = backward_of_two_replicas(push_pull)
    gpu.run()
    own.finish()
    backwards(own, model, first_layer=1)
    gpu.run()
    until(lambda: own.summed == LAYERS - 1)
    own.finish_late()  # the first layer's zeros are still on their way to the host
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(backwards, own, model)
        assert wait([third], 0.1).not_done
        gpu.run()
        expected = third.result(10)
    gpu.run()
    own.finish()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad.as_subclass(Tensor), wanted)
    own.close()


def test_an_abort_ends_the_wait_for_a_gpu(push_pull: PushPull) -> None:
    own, _, _ = backward_of_two_replicas(push_pull)
    push_pull.abort("a worker is gone")
    with pytest.raises(GenerationOver, match="a worker is gone"):
        own.finish()
    thread = push_pull._filling_thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
    with contextlib.suppress(GenerationOver):
        own.close()
