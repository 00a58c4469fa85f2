"""Shared memory: slots are used again, grow when they must, and nothing stays behind."""

import gc
import os
import pathlib
import shutil
import tempfile
import threading
from collections.abc import Iterator

import pytest
import torch

from lp_pipe.channels import ChannelHub, kinds, open_sender
from lp_pipe.channels.packing import TensorSpec
from lp_pipe.channels.receiver import Receiver
from lp_pipe.channels.recycler import Recycler
from lp_pipe.channels.ring import RingOutlet, _Segment
from lp_pipe.channels.sender import Sender

pytestmark = pytest.mark.skipif(not kinds.is_shm_supported, reason="no memfd_create")

PATIENCE_S = 10.0
MEBI = 1 << 20


class Edge:
    def __init__(self, directory: str, credits: int = 2) -> None:
        self.hub = ChannelHub(f"unix:{directory}/s", "stages/1")
        self.receiver: Receiver = self.hub.receiver("activations", credits)
        self.sender: Sender = open_sender(self.hub.endpoint, "activations", kind="shm")

    @property
    def outlet(self) -> RingOutlet:
        assert isinstance(self.sender._outlet, RingOutlet)
        return self.sender._outlet

    def pass_on(self, size_bytes: int) -> torch.Tensor:
        self.sender.send(0, torch.full((size_bytes,), 7, dtype=torch.uint8))
        received = self.receiver.receive(0, PATIENCE_S)
        assert torch.equal(received, torch.full((size_bytes,), 7, dtype=torch.uint8))
        assert isinstance(received, torch.Tensor)
        return received


@pytest.fixture
def edge() -> Iterator[Edge]:
    directory = tempfile.mkdtemp(prefix="lp")
    made = Edge(directory)
    yield made
    made.hub.close("the test is over")
    shutil.rmtree(directory)


def inode_of(segment: _Segment | None) -> int:
    assert segment is not None
    return os.fstat(segment._fd).st_ino


def mappings_of(inode: int) -> int:
    """How often this process has the segment mapped: once by the sender, once by the receiver."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split()[4] == str(inode) for line in lines)


def test_slots_are_used_again(edge: Edge) -> None:
    edge.pass_on(1000)
    segment = edge.outlet._segment
    for size in (0, 1, 5000, 1000, 1 << 16):
        edge.pass_on(size)
    assert edge.outlet._segment is segment


def test_slots_grow_and_the_old_segment_goes_with_its_last_message(edge: Edge) -> None:
    edge.sender.send(0, torch.ones(10))
    old = inode_of(edge.outlet._segment)
    edge.sender.send(0, torch.ones(MEBI))
    segment = edge.outlet._segment
    assert segment is not None and segment.slot_bytes == 4 * MEBI
    assert mappings_of(old) >= 1, "its message has not been received"
    assert torch.equal(edge.receiver.receive(0, PATIENCE_S), torch.ones(10))
    assert torch.equal(edge.receiver.receive(0, PATIENCE_S), torch.ones(MEBI))
    for _ in range(edge.receiver.credits):  # needs all credits, so the first message's has come back
        edge.sender.send(0, None)
    assert mappings_of(old) == 0
    assert mappings_of(inode_of(segment)) == 2


def test_nothing_is_mapped_after_closing() -> None:
    directory = tempfile.mkdtemp(prefix="lp")
    edge = Edge(directory)
    edge.pass_on(MEBI)
    inode = inode_of(edge.outlet._segment)
    edge.hub.close("done")
    del edge
    for thread in threading.enumerate():
        if thread.name.startswith(("read ", "accept ")):  # they end a moment after the closing
            thread.join(PATIENCE_S)
    gc.collect()
    shutil.rmtree(directory)
    assert mappings_of(inode) == 0


def test_large_received_tensors_use_the_memory_of_those_that_are_gone(edge: Edge) -> None:
    first = edge.pass_on(2 * MEBI)
    address, view = first.data_ptr(), first[5:]
    del first
    second = edge.pass_on(2 * MEBI)
    assert second.data_ptr() != address, "a view still uses it"
    del view
    assert edge.pass_on(2 * MEBI).data_ptr() == address


def test_memory_of_shapes_that_come_no_more_is_given_back() -> None:
    recycler = Recycler()
    for mebibytes in (1, 2, 3):
        recycler.empty(TensorSpec(torch.uint8, (mebibytes * MEBI,), (1,)))
    assert [len(block) for block in recycler._blocks] == [3 * MEBI]


def test_a_received_tensor_is_a_tensor_like_any_other(edge: Edge) -> None:
    tensor = edge.pass_on(2 * MEBI).float().detach()
    received = edge.pass_on(2 * MEBI)
    assert not received._is_view()
    assert received.untyped_storage().nbytes() == 2 * MEBI
    assert tensor.requires_grad_().sum().item() == 7 * 2 * MEBI


def test_a_sender_that_fails_to_send_closes_the_channel(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(count: int) -> int:
        raise MemoryError(f"no {count} bytes")

    monkeypatch.setattr(RingOutlet, "_fitting_segment", lambda self, size, credits: no_memory(size))
    with pytest.raises(MemoryError):
        edge.sender.send(0, torch.ones(4))
    with pytest.raises(Exception, match="the sender failed to send: MemoryError: no 64 bytes"):
        edge.receiver.receive(0, PATIENCE_S)
