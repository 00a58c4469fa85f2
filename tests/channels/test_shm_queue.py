"""A queue in shared memory: counted messages are there, a sleeping end is woken, and an awake one is left alone."""

import mmap
import random
import shutil
import tempfile
import time
from collections.abc import Iterator

import pytest
import torch

from lp_pipe.channels import ChannelHub, Receiver, Sender, open_sender, shm_queue
from lp_pipe.channels.messages import WAKE_UP
from lp_pipe.channels.shm_queue import ShmQueue, is_shm_queue_supported
from lp_pipe.connections import Frame
from lp_pipe.errors import ChannelClosed
from tests.channels.edges import PATIENCE_S, in_thread, is_blocked

pytestmark = pytest.mark.skipif(not is_shm_queue_supported, reason="needs memfd_create and x86")


@pytest.fixture
def boards() -> tuple[ShmQueue, ShmQueue]:
    """The sender's view and the receiver's of one queue, for 2 messages at a time."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    return ShmQueue(memory, 2), ShmQueue(memory, 2)


@pytest.fixture
def hub() -> Iterator[ChannelHub]:
    directory = tempfile.mkdtemp(prefix="lp")
    made = ChannelHub(f"unix:{directory}/s", "stages/1")
    yield made
    made.close("the test is over")
    shutil.rmtree(directory)


def ends(hub: ChannelHub, credits: int) -> tuple[Sender, Receiver]:
    """Yield both ends with one message behind them, so that layout and memory are known."""
    receiver = hub.receiver("activations", credits)
    sender = open_sender(hub.endpoint, "activations", kind="shm", peer="stages/1")
    sender.send(0, torch.zeros(1))
    receiver.receive(0, PATIENCE_S)
    return sender, receiver


def test_messages_are_seen_in_order_and_credits_come_back(boards: tuple[ShmQueue, ShmQueue]) -> None:
    sender, receiver = boards
    assert receiver.next() is None
    for number in range(5):
        sender.publish(tag=7, token=number)
        assert receiver.next() == (7, number)
        receiver.advance()
        receiver.take()
        assert (sender.sent, sender.taken) == (number + 1, number + 1)


def test_only_who_sleeps_is_nudged_and_once(boards: tuple[ShmQueue, ShmQueue]) -> None:
    sender, receiver = boards
    assert not sender.publish(0, 0), "the receiver is awake"
    assert receiver.receiver_doorbell.arm(seen=1)
    assert sender.publish(0, 1)
    assert not receiver.take() and not sender.receiver_doorbell.must_ring()


def test_nobody_falls_asleep_over_news(boards: tuple[ShmQueue, ShmQueue]) -> None:
    sender, receiver = boards
    seen = receiver.receiver_doorbell.count()
    sender.publish(0, 0)
    assert not receiver.receiver_doorbell.arm(seen)
    assert not sender.publish(0, 1), "it is awake"


def test_values_alike_need_no_frames(hub: ChannelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends(hub, credits=4)
    frames: list[Frame] = []
    monkeypatch.setattr(sender._connection, "send", frames.append)
    monkeypatch.setattr(receiver._connection, "send", frames.append)
    for number in range(10):
        sender.send(0, torch.full((1,), float(number)))
        assert receiver.receive(0, PATIENCE_S).item() == number
    assert frames == []


def test_a_sender_killed_before_the_nudge_has_sent_its_value(hub: ChannelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends(hub, credits=4)
    receiving = in_thread(lambda: receiver.receive(0, PATIENCE_S).item())
    assert is_blocked(receiving)
    nudges: list[Frame] = []
    monkeypatch.setattr(sender._connection, "send", nudges.append)
    sender.send(0, torch.full((1,), 5.0))
    assert nudges == [WAKE_UP] and is_blocked(receiving)
    sender._connection.inner._shutdown()  # type: ignore[attr-defined]  # as the kernel does for a process that is killed
    assert receiving.result(PATIENCE_S) == 5.0
    with pytest.raises(ChannelClosed, match="killed"):
        receiver.receive(0, PATIENCE_S)


def test_a_receiver_killed_before_the_nudge_ends_the_send(hub: ChannelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends(hub, credits=1)
    assert receiver._connection is not None
    sender.send(0, torch.zeros(1))
    sending = in_thread(sender.send, 0, torch.ones(1))
    assert is_blocked(sending)
    monkeypatch.setattr(receiver._connection, "send", lambda frame: None)
    receiver._connection._shutdown()  # type: ignore[attr-defined]
    with pytest.raises(ChannelClosed, match="killed"):
        sending.result(PATIENCE_S)
    with pytest.raises(ChannelClosed, match="killed"):
        sender.send(0, torch.ones(1))


def test_a_receiver_that_has_ended_is_noticed_with_credits_left(hub: ChannelHub) -> None:
    sender, receiver = ends(hub, credits=4)
    receiver.close("had enough")
    with pytest.raises(ChannelClosed, match="had enough"):
        sender.send(0, torch.ones(1))


def test_a_receiver_that_was_killed_a_moment_ago_is_noticed(hub: ChannelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: after a receiver had taken everything and died, the next value was sent to no process."""
    sender, receiver = ends(hub, credits=4)
    assert receiver._connection is not None
    sender.send(0, torch.zeros(1))
    receiver.receive(0, PATIENCE_S)
    receiver._connection._shutdown()  # type: ignore[attr-defined]
    monkeypatch.setattr(shm_queue, "_A_MOMENT_S", 0.0)  # it has passed
    with pytest.raises(ChannelClosed, match="killed"):
        sender.send(0, torch.ones(1))


@pytest.mark.parametrize("credits", [1, 3])
def test_no_wake_up_is_lost(hub: ChannelHub, credits: int) -> None:
    """Let both ends sleep, look and hurry in turn."""
    sender, receiver = ends(hub, credits)
    moments = random.Random(credits)

    def send_all() -> None:
        for number in range(400):
            time.sleep(moments.choice((0, 0, 0, 1e-4, 1e-3)))
            sender.send(0, torch.full((1,), float(number)))

    sending = in_thread(send_all)
    for number in range(400):
        if number % 7 == 0:
            time.sleep(random.Random(number).choice((0, 1e-4, 1e-3)))
        assert receiver.receive(0, PATIENCE_S).item() == number
    sending.result(PATIENCE_S)
