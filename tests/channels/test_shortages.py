"""A shortage of descriptors, memory or threads: both ends learn at once which it is, and neither waits for ever."""

import contextlib
import errno
import os
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from lp_pipe import connections
from lp_pipe.channels import buffer_pool, kinds, open_sender
from lp_pipe.channels.async_receive import SIZE, AsyncReceiver
from lp_pipe.channels.base import TransferError
from lp_pipe.channels.gloo import GlooReceiver, GlooSender
from lp_pipe.channels.packing import Layout
from lp_pipe.channels.queued_connection import QueuedConnection
from lp_pipe.channels.rank_transport import RankReceiver
from lp_pipe.connections import Connection, Frame, frames, grpc_channels, tcp_endpoint
from lp_pipe.connections.credentials import Credentials
from lp_pipe.connections.unix import UnixConnection
from lp_pipe.errors import ChannelClosed, LpPipeError, Unavailable
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


@pytest.mark.skipif(not kinds.is_shm_supported(), reason="no memfd_create")
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
        said = r"channel 'activations' .*Too many open files; raise the limit of that process"
        with pytest.raises(ChannelClosed, match=said):
            sender.send(0, torch.ones(4))
        with pytest.raises(ChannelClosed, match=said):
            receiver.receive(0, PATIENCE_S)
    again, receiver = edge.sender(), edge.receiver()
    again.send(0, torch.ones(4))
    assert_same(receiver.receive(0, PATIENCE_S), torch.ones(4))


@pytest.mark.parametrize("kind", ["stream", "grpc", "tls", "gloo"], indirect=True)
def test_a_sender_without_memory_says_so_in_that_send_and_the_next_one_goes(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the sender closed the channel, and did not name the shortage."""
    sender, receiver = edge.sender(), edge.receiver(credits=2)
    sender.send(0, torch.ones(3))
    receiver.receive(0, PATIENCE_S)
    with monkeypatch.context() as shortage:
        shortage.setattr(buffer_pool, "fresh_memory", no_memory)
        for _ in range(3):  # they cost no credits
            said = rf"channel 'activations' to stages/1: .*{MEBI} bytes: .*Cannot allocate"
            with pytest.raises(OSError, match=said) as caught:
                sender.send(0, torch.ones(MEBI, dtype=torch.uint8))
            assert isinstance(caught.value, LpPipeError)
    for size in (MEBI, 8, MEBI):
        sender.send(0, torch.full((size,), 7, dtype=torch.uint8))
        assert_same(receiver.receive(0, PATIENCE_S), torch.full((size,), 7, dtype=torch.uint8))


@pytest.mark.parametrize("kind", ["gloo"], indirect=True)
def test_a_receiver_without_memory_tells_both_ends(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender was told that its peer had been killed."""
    sender, receiver = edge.sender(), edge.receiver()
    sender.send(0, torch.ones(3))
    receiver.receive(0, PATIENCE_S)
    assert isinstance(receiver._transport, RankReceiver)
    monkeypatch.setattr(receiver._transport.backend, "empty", no_memory)
    sender.send(1, torch.ones(3))
    said = "the receiver cannot take a message of 64 bytes: .*Cannot allocate memory"
    with pytest.raises(ChannelClosed, match=said):
        receiver.receive(1, PATIENCE_S)
    with pytest.raises(ChannelClosed, match=said):
        sender.send(2, torch.ones(3))


def test_gloo_is_not_begun_with_few_descriptors_left() -> None:
    """Gloo's thread would end the process when it finds no descriptor for a peer that connects."""
    sending, receiving = GlooSender(), GlooReceiver()
    with descriptors_left(20):
        sending.begin(receiving.on_note)
        receiving.begin(sending.on_note)
        for half in (sending, receiving):
            with pytest.raises(TransferError, match=r"gloo cannot connect .*Too many open files; .*\(ulimit -n\)"):
                half.group()
    for half in (sending, receiving):
        half.close("the test is over")


def test_grpc_is_not_begun_with_few_descriptors_left(run_credentials: Credentials) -> None:
    """gRPC would end the process when it finds no descriptor for its first channel."""
    where = tcp_endpoint.parse("grpc:127.0.0.1:1")
    with descriptors_left(1), pytest.raises(OSError, match="Too many open files"):  # threads of others may close some
        grpc_channels.open_channel(where, run_credentials)


def test_a_receiver_that_finds_no_thread_for_its_timer_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a receiver whose sender was killed in the middle of a message waited for ever."""
    has_ended = threading.Event()

    class Never:
        def wait(self, timeout: timedelta, /) -> None:
            has_ended.wait(PATIENCE_S)

    class Waiting(AsyncReceiver):
        def _start(self, token: int, size: int, header: Any) -> tuple[Never, Tensor]:
            return Never(), torch.empty(size, dtype=torch.uint8)

        def _tensors_in(self, memory: Tensor, layout: Layout) -> list[Tensor]:
            return []

    transport = Waiting("gloo")
    parcel = transport.accept(0, [SIZE.pack(8)])
    assert isinstance(parcel, Future)
    monkeypatch.setattr(threading.Thread, "start", no_threads)
    transport.end("it was killed")
    with pytest.raises(TransferError, match="it was killed"):
        parcel.result(PATIENCE_S)
    has_ended.set()


def test_who_is_not_taken_in_is_told_why_however_late_its_thread_reads_that(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the error was "Broken pipe" where the reading thread came later than the send."""
    is_refused, has_failed = threading.Event(), threading.Event()
    send, read = UnixConnection.send, UnixConnection._read_to_end

    def late_read(self: UnixConnection) -> None:
        has_failed.wait(PATIENCE_S)
        read(self)

    def failing_send(self: UnixConnection, frame: Frame) -> None:
        is_refused.wait(PATIENCE_S)
        try:
            send(self, frame)
        finally:
            has_failed.set()

    def refuse(connection: Connection) -> None:
        connection.close("there is no room")
        is_refused.set()

    monkeypatch.setattr(UnixConnection, "_read_to_end", late_read)
    monkeypatch.setattr(UnixConnection, "send", failing_send)
    listener = connections.listen(f"unix:{directory}/s", refuse)
    with pytest.raises(Unavailable, match="channel 'activations' to stages/1: there is no room"):
        open_sender(listener.endpoint, "activations", kind="stream", peer="stages/1")
    listener.close()


def test_what_a_thread_was_sending_when_the_peer_closed_does_not_hide_why() -> None:
    near, far = (UnixConnection(sock, "the peer") for sock in socket.socketpair())
    told: Future[str] = Future()
    queued = QueuedConnection(near)
    assert near.try_reading(), "as another thread that reads"
    queued.attach(lambda frame: None, told.set_result)
    queued.send(Frame(frames.CHANNEL_DATA, buffers=[bytes(8 * MEBI)]))
    far.close("there is no room")
    assert queued._thread is not None
    queued._thread.join(PATIENCE_S)
    near.read()
    near.done_reading()
    assert told.result(PATIENCE_S) == "there is no room"
