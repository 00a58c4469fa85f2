"""No more descriptors, memory or threads: both ends hear which, at once, and nobody waits for ever."""

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lp_pipe.channels import kinds
from lp_pipe.errors import ChannelClosed
from tests.channels.edges import PATIENCE_S, Edge, assert_same

MEBI = 1 << 20


def no_descriptors(*args: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def no_memory(*args: object) -> Any:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def no_threads(*args: object) -> None:
    raise RuntimeError("can't start new thread")


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not kinds.is_shm_supported, reason="no memfd_create")
@pytest.mark.parametrize("kind", ["shm"], indirect=True)
@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_a_receiver_without_descriptors_tells_the_sender_that_waits_for_it(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The sender waited until the hub closed, or was told that its peer had been killed."""
    with monkeypatch.context() as shortage:
        if first == "sender":
            sender = edge.sender()
            shortage.setattr(os, "memfd_create", no_descriptors)
            receiver = edge.receiver()
        else:
            receiver = edge.receiver()
            shortage.setattr(os, "memfd_create", no_descriptors)
            sender = edge.sender()
        said = r"channel 'activations' .*could not be taken in: .*Too many open files; raise the limit of that process"
        with pytest.raises(ChannelClosed, match=said):
            sender.send(0, torch.ones(4))
        with pytest.raises(ChannelClosed, match=said):
            receiver.receive(0, PATIENCE_S)
    again, receiver = edge.sender(), edge.receiver()
    again.send(0, torch.ones(4))
    assert_same(receiver.receive(0, PATIENCE_S), torch.ones(4))
