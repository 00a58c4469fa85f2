"""Shared memory: slots are used again, grow when they must, and nothing stays behind."""

import errno
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
from lp_pipe.channels.buffer_pool import BufferPool
from lp_pipe.channels.packing import TensorSpec
from lp_pipe.channels.receiver import Receiver
from lp_pipe.channels.ring import RingSender
from lp_pipe.channels.segments import Segment
from lp_pipe.channels.sender import Sender
from lp_pipe.errors import ChannelClosed, LpPipeError
from tests.forking import holds_in_a_fork
from tests.waiting import until

pytestmark = pytest.mark.skipif(not kinds.is_shm_supported(), reason="no memfd_create")

PATIENCE_S = 10.0
MEBI = 1 << 20


class Edge:
    def __init__(self, directory: str, credits: int = 2) -> None:
        self.hub = ChannelHub(f"unix:{directory}/s", "stages/1")
        self.receiver: Receiver = self.hub.receiver("activations", credits)
        self.sender: Sender = open_sender(self.hub.endpoint, "activations", kind="shm")

    @property
    def transport(self) -> RingSender:
        assert isinstance(self.sender._transport, RingSender)
        return self.sender._transport

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


def inode_of(segment: Segment) -> int:
    return os.fstat(segment._fd).st_ino


def mappings_of(inode: int) -> int:
    """Return how often this process maps the segment: once for the sender and once for the receiver."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split()[4] == str(inode) for line in lines)


@pytest.mark.parametrize("size", [1000, MEBI])
def test_what_a_forked_process_writes_to_a_received_tensor_stays_its_own(edge: Edge, size: int) -> None:
    received = edge.pass_on(size)

    def write() -> bool:
        received[0] = 1
        return bool(received[0] == 1)

    assert holds_in_a_fork(write)
    assert received[0] == 7
    edge.pass_on(size)  # the channel goes on


def test_slots_are_used_again(edge: Edge) -> None:
    edge.pass_on(1000)
    (segment,) = edge.transport._small
    for size in (0, 1, 5000, 1000, 1 << 16):
        edge.pass_on(size)
    assert edge.transport._small == [segment]


def test_slots_grow_and_the_old_segment_goes_with_its_last_message(edge: Edge) -> None:
    edge.sender.send(0, torch.ones(10))
    old = inode_of(edge.transport._small[0])
    edge.sender.send(0, torch.ones(30_000))
    (segment,) = edge.transport._small
    assert segment.slot_bytes == 1 << 17
    assert mappings_of(old) >= 1, "its message has not been received"
    assert torch.equal(edge.receiver.receive(0, PATIENCE_S), torch.ones(10))
    assert torch.equal(edge.receiver.receive(0, PATIENCE_S), torch.ones(30_000))
    for _ in range(edge.receiver.credits):  # needs all credits, so the first message's has come back
        edge.sender.send(0, None)
    assert mappings_of(old) == 0
    assert mappings_of(inode_of(segment)) == 2


def test_nothing_is_mapped_after_closing() -> None:
    directory = tempfile.mkdtemp(prefix="lp")
    edge = Edge(directory)
    edge.pass_on(MEBI)
    inode = inode_of(edge.transport._large[0])
    edge.hub.close("done")
    del edge
    for thread in threading.enumerate():
        if thread.name.startswith(("read ", "accept ")):  # they end a moment after the closing
            thread.join(PATIENCE_S)
    gc.collect()
    shutil.rmtree(directory)
    assert mappings_of(inode) == 0


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_nothing_of_a_closed_channel_stays_mapped_while_its_hub_makes_others(edge: Edge, who: str) -> None:
    """Regression: each restart of a stage left its neighbours one more mapping and descriptor a channel."""
    inodes = []
    for number in range(3):
        receiver = edge.hub.receiver(f"epoch {number}")
        sender = open_sender(edge.hub.endpoint, f"epoch {number}", kind="shm")
        sender.send(0, torch.ones(MEBI))
        receiver.receive(0, PATIENCE_S)
        assert isinstance(sender._transport, RingSender)
        inodes.append(inode_of(sender._transport._large[0]))
        (sender if who == "sender" else receiver).close("a worker was restarted")
        with pytest.raises(ChannelClosed):
            receiver.receive(1, PATIENCE_S)
        sender.close("a worker was restarted")
        del sender, receiver
    edge.hub.receiver("the next")
    until(lambda: gc.collect() >= 0 and not any(map(mappings_of, inodes)), PATIENCE_S)  # a thread may be about to end


def test_large_received_tensors_use_the_memory_of_those_that_are_gone(edge: Edge) -> None:
    addresses = {edge.pass_on(2 * MEBI).data_ptr() for _ in range(20)}
    assert len(addresses) == 1, "that one has gone is known before the next one is sent"


def test_large_received_tensors_stay_as_long_as_any_part_of_them_is_used(edge: Edge) -> None:
    view = edge.pass_on(2 * MEBI)[5:8]
    address = view.data_ptr()
    for _ in range(10):
        assert edge.pass_on(2 * MEBI).data_ptr() != address - 5
    assert view.tolist() == [7, 7, 7]


def test_a_forked_child_gives_nothing_back(edge: Edge) -> None:
    """Data loaders fork; what the child drops is still the parent's."""
    held = edge.pass_on(2 * MEBI)
    child = os.fork()
    if not child:
        del held
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    (segment,) = edge.transport._large
    assert segment.is_used
    del held
    assert not segment.is_used


def test_holding_large_values_does_not_hold_up_the_sender(edge: Edge) -> None:
    """Activations wait for their backward; credits do not wait for them."""
    held = []
    for number in range(12):
        edge.sender.send(0, torch.full((MEBI,), float(number)))
        held.append(edge.receiver.receive(0, PATIENCE_S))
    assert len(edge.transport._large) == 3
    assert [tensor.unique().tolist() for tensor in held] == [[float(number)] for number in range(12)]
    held.clear()
    for _ in range(30):
        edge.pass_on(MEBI)
    assert len(edge.transport._large) == 3, "their slots are used again"


@pytest.mark.parametrize("closing", ["sender", "receiver"])
def test_large_received_tensors_outlive_the_channel_and_may_be_written(edge: Edge, closing: str) -> None:
    edge.sender.send(0, {"a": torch.ones(MEBI), "b": torch.zeros(5)})
    value = edge.receiver.receive(0, PATIENCE_S)
    (edge.sender if closing == "sender" else edge.receiver).close("enough")
    gc.collect()
    value["a"] += 1
    value["b"].fill_(3)
    assert value["a"].sum().item() == 2 * MEBI and value["b"].tolist() == [3] * 5
    assert value["a"].data_ptr() % 64 == 0 and value["b"].data_ptr() % 64 == 0
    assert value["a"].untyped_storage().nbytes() == 4 * MEBI, "they look as apart as they were"


def test_dropped_large_values_give_their_memory_back(edge: Edge) -> None:
    for tag in range(20):
        edge.sender.send(tag, torch.ones(MEBI))
        edge.receiver.abort(tag, "not wanted")
        edge.receiver.poll()
    assert len(edge.transport._large) == 1


def test_memory_of_shapes_that_come_no_more_is_given_back() -> None:
    pool = BufferPool()
    for mebibytes in (1, 2, 3):
        pool.empty(TensorSpec(torch.uint8, (mebibytes * MEBI,), (1,)))
    assert [len(block) for block in pool._blocks] == [3 * MEBI]


def test_a_received_tensor_is_a_tensor_like_any_other(edge: Edge) -> None:
    tensor = edge.pass_on(2 * MEBI).float().detach()
    received = edge.pass_on(2 * MEBI)
    assert not received._is_view()
    assert received.untyped_storage().nbytes() == 2 * MEBI
    assert tensor.requires_grad_().sum().item() == 7 * 2 * MEBI


def test_a_sender_that_fails_to_send_closes_the_channel(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(count: int) -> int:
        raise MemoryError(f"no {count} bytes")

    monkeypatch.setattr(RingSender, "_take_slot", lambda self, size, credits: no_memory(size))
    with pytest.raises(MemoryError):
        edge.sender.send(0, torch.ones(4))
    with pytest.raises(Exception, match="the sender failed to send: MemoryError: no 64 bytes"):
        edge.receiver.receive(0, PATIENCE_S)


def test_a_sender_out_of_descriptors_says_so_in_that_send_and_the_next_one_goes(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    edge.pass_on(8)
    with monkeypatch.context() as out_of_descriptors:
        out_of_descriptors.setattr(os, "memfd_create", none_left)
        for _ in range(5):  # they cost no credits, of which there are two
            with pytest.raises(OSError, match=r"channel .*shared memory.*Too many open files.*ulimit -n") as caught:
                edge.sender.send(0, torch.ones(MEBI))
            assert isinstance(caught.value, LpPipeError)
    for size in (MEBI, 8, MEBI):
        edge.pass_on(size)


def test_a_receiver_out_of_descriptors_tells_both_ends_whose_limit_it_is(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(announced: bytes) -> None:
        raise OSError(errno.EMFILE, "Too many open files", "/proc/1/fd/9")

    monkeypatch.setattr("lp_pipe.channels.segments.opened", none_left)
    edge.sender.send(0, torch.ones(4))
    said = r"the receiver cannot open the sender's memory: .*Too many open files.*; raise the limit of that process"
    with pytest.raises(ChannelClosed, match=said):
        edge.receiver.receive(0, PATIENCE_S)
    with pytest.raises(ChannelClosed, match=said):
        edge.sender.send(1, torch.ones(4))
