"""Gloo's two ranks of a channel: how they find each other, and the error when they do not."""

import contextlib
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from random import Random

import psutil
import pytest
import torch

from lp_pipe.channels import rank_transport
from lp_pipe.channels.base import TransferError
from lp_pipe.channels.gloo import GlooReceiver, GlooSender
from tests.channels.edges import PATIENCE_S

Ends = tuple[GlooSender, GlooReceiver]


@pytest.fixture
def pair() -> Iterator[Ends]:
    made = GlooSender(), GlooReceiver()
    yield made
    for half in made:
        half.close("the test is over")
    for thread in threading.enumerate():
        if thread.name == "connect gloo":
            thread.join(PATIENCE_S)  # a process that ends while one is in gloo is aborted


def begin(pair: Ends, on_the_way: Callable[[bytes], bytes] = lambda note: note) -> None:
    """Notes pass at once, and may be changed."""
    sending, receiving = pair
    sending.begin(lambda note: receiving.on_note(on_the_way(note)))
    receiving.begin(lambda note: sending.on_note(on_the_way(note)))


def test_they_connect_at_the_addresses_that_each_was_given(pair: Ends) -> None:
    for half in pair:
        half.address = "::1"
    begin(pair)
    received = torch.zeros(3)
    work = pair[1].group().recv([received], 0, 7)
    pair[0].group().send([torch.ones(3)], 1, 7).wait()
    work.wait()
    assert torch.equal(received, torch.ones(3))


def test_strangers_at_gloos_ports_change_nothing(pair: Ends, many_descriptors: None) -> None:
    before = listening_ports()
    begin(pair)
    for half in pair:
        half.group()
    random = Random(0)
    with contextlib.ExitStack() as stack:
        for port in listening_ports() - before:
            for number in range(2020):
                stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
                stranger.sendall(random.randbytes(1 + number % 40))
                if number >= 20:  # 2,000 stay half open
                    stack.callback(stranger.close)
                else:
                    stranger.close()
        received = torch.zeros(3)
        work = pair[1].group().recv([received], 0, 7)
        pair[0].group().send([torch.ones(3)], 1, 7).wait()
        work.wait()
    assert torch.equal(received, torch.ones(3))


def listening_ports() -> set[int]:
    connections = psutil.Process().net_connections("tcp4")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def test_an_address_that_is_not_this_hosts_is_named(pair: Ends) -> None:
    pair[0].address = "192.0.2.1"
    begin(pair)
    for half, who in zip(pair, ("^", "^the other end: "), strict=True):  # who waited for it is told at once
        why = r"gloo cannot connect 192\.0\.2\.1 with .*resolve.*--interface chooses"
        with pytest.raises(TransferError, match=who + why):
            half.group()


def test_who_cannot_reach_each_other_are_both_named_at_the_deadline(
    pair: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand behind a firewall that lets only gRPC's port through."""
    monkeypatch.setattr(rank_transport, "CONNECT_PATIENCE_S", 0.5)

    def to_nowhere(note: bytes) -> bytes:
        key, value = pickle.loads(note)
        if key.startswith(("address", "secret")):
            return note
        return pickle.dumps((key, value.replace(b"\x7f\x00\x00\x01", b"\xc0\x00\x02\x01")))  # 192.0.2.1

    begin(pair, to_nowhere)
    for half in pair:
        with pytest.raises(
            TransferError, match=r"gloo cannot connect 127\.0\.0\.1 with 127\.0\.0\.1: .*(timeout|within 1 s)"
        ):
            half.group()


def test_somebody_who_connects_without_having_heard_the_notes_is_not_taken_for_the_other_end(pair: Ends) -> None:
    def other_secret(note: bytes) -> bytes:
        key, _value = pickle.loads(note)
        return pickle.dumps((key, b"?" * 32)) if key.startswith("secret") else note

    begin(pair, other_secret)
    with pytest.raises(TransferError, match=r"stranger .* gloo.* 127\.0\.0\.1"):
        pair[0].group()
