"""A peer that is killed: the other process notices it soon, and nothing is left."""

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

from lp_pipe.channels import ChannelHub, Receiver, kinds, open_sender
from lp_pipe.connections.credentials import Credentials
from lp_pipe.errors import ChannelClosed
from lp_pipe.testing import assert_no_leaks

KINDS = ["shm", "grpc", "tls", "gloo"]
PATIENCE_S = 20.0
PROMPT_S = 2.0

# A template that has imported torch, which takes two seconds: each request makes it fork a peer.
TEMPLATE = """
import json, os, signal, socket, sys, torch, lp_pipe.channels
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
requests = socket.socket(fileno=int(sys.argv[1]))
while True:
    request, streams, _, _ = socket.recv_fds(requests, 1 << 16, 2)
    if not request:
        break
    pid = os.fork()
    if pid:
        requests.send(str(pid).encode())
    else:
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(streams[0], 0), os.dup2(streams[1], 1)
        code, variables, *sys.argv[1:] = json.loads(request)
        os.environ.update(variables)
    for stream in streams:
        os.close(stream)
    if not pid:
        exec(code, {"__name__": "__main__"})
        os._exit(0)
"""

TRUSTED = """
import base64, os
from lp_pipe.connections.credentials import Credentials, use_credentials
use_credentials(Credentials.from_bytes(base64.b64decode(os.environ["LP_TEST_CREDENTIALS"])))
"""

SENDING = """
import sys, torch
from lp_pipe.channels import open_sender
sender = open_sender(sys.argv[1], "activations", kind=sys.argv[2], name="stages/0")
for number in range(2):
    sender.send(0, torch.full((300_000,), float(number)))
sender._transport.finish()
print("sent", flush=True)
sys.stdin.read()
"""

DYING = """
import os, signal, sys, torch
from lp_pipe.channels import open_sender
sender = open_sender(sys.argv[1], "activations", kind="gloo", name="stages/0")
large = torch.zeros(100_000_000)
sender.send(0, torch.zeros(1))
sys.stdin.readline()
sender.send(0, large)
os.kill(os.getpid(), signal.SIGKILL)
"""

CUT_OFF = """
import sys, torch
from lp_pipe.channels import open_sender, packing
from lp_pipe.channels.async_receive import SIZE
from lp_pipe.channels.messages import data_frame
sender = open_sender(sys.argv[1], "activations", kind="gloo", name="stages/0")
sender.send(0, torch.zeros(1))
sys.stdin.readline()
layout, _ = packing.pack(torch.ones(3))
sender._connection.send(data_frame(1, layout.encode(), 1, [SIZE.pack(layout.offsets[-1])]))
sender._transport.close = lambda reason: None  # gloo's own connection stays
sender._connection.close("cut off")
sys.stdin.read()
"""

HEARING_OF_A_DEATH = """
import sys
from lp_pipe.channels import ChannelHub
from lp_pipe.errors import ChannelClosed
hub = ChannelHub(sys.argv[1], "stages/1")
receiver = hub.receiver("activations")
print(hub.endpoint, flush=True)
receiver.receive(0)
print("the first", flush=True)
try:
    receiver.receive(0)
except ChannelClosed as error:
    print(error, flush=True)
sys.stdin.read()
"""

FORKING = """
import os, signal, sys, time, torch
from lp_pipe.channels import open_sender
sender = open_sender(sys.argv[1], "activations", kind=sys.argv[2], name="stages/0")
sender.send(0, torch.zeros(1))
sender._transport.finish()
sys.stdin.readline()
if not os.fork():
    print("forked", flush=True)
    sys.stdin.read()
    os._exit(0)
time.sleep(60)
"""

RECEIVING = """
import sys, torch
from lp_pipe.channels import ChannelHub
hub = ChannelHub(sys.argv[1], "stages/1")
receiver = hub.receiver("activations", credits=2)
print(hub.endpoint, flush=True)
print(receiver.receive(0).sum().item(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def endpoint(kind: str, run_credentials: Credentials, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("LP_TEST_CREDENTIALS", base64.b64encode(run_credentials.to_bytes()).decode())
    directory = tempfile.mkdtemp(prefix="lp")
    yield "tls:127.0.0.1:0" if kind == "tls" else kinds.named(kind).hub_endpoint(f"unix:{directory}/s")
    shutil.rmtree(directory)


@pytest.fixture(scope="module", autouse=True)
def template() -> Iterator[None]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, subprocess.Popen([sys.executable, "-c", TEMPLATE, str(theirs.fileno())], pass_fds=[theirs.fileno()]):
        theirs.close()
        Peer.template = ours
        yield
        ours.close()  # which ends the template


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    # Not a mere look into /dev/shm: programs that run beside this one have their own there (multiprocessing's locks).
    with assert_no_leaks(ignore_threads=["watch channels"]):  # one for the process, from its first channel on
        yield


class Peer:
    """Another process, forked from the template; its lines on stdout say how far it is."""

    template: socket.socket

    def __init__(self, code: str, *args: str) -> None:
        (its_input, to_it), (from_it, its_output) = os.pipe(), os.pipe()
        variables = {"LP_TEST_CREDENTIALS": os.environ["LP_TEST_CREDENTIALS"]}
        request = json.dumps([TRUSTED + code, variables, *args])
        socket.send_fds(self.template, [request.encode()], [its_input, its_output])
        os.close(its_input), os.close(its_output)
        self._input, self._output = os.fdopen(to_it, "w"), os.fdopen(from_it)
        self._pid = int(self.template.recv(100))
        self._is_killed = False

    def line(self) -> str:
        return self._output.readline().strip()

    def go(self) -> None:
        self._input.write("\n")
        self._input.flush()

    def kill(self) -> None:
        self._is_killed = True  # its number may soon be another process's
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_killed:
            self.kill()
        with self._input, self._output:
            self._input.close()
            self._output.read()  # until it has ended, and what it has forked


def wait_for_the_next(receiver: Receiver) -> None:
    """Wait until the message is here: a killed sender takes along what it is still sending."""
    with receiver._state:
        assert receiver._reading.wait_for(receiver._has_arrived, PATIENCE_S)


def test_a_killed_sender_ends_a_blocked_receive(endpoint: str, kind: str) -> None:
    hub = ChannelHub(endpoint, "stages/1")
    receiver = hub.receiver("activations")
    with Peer(SENDING, hub.endpoint, kind) as peer:
        assert peer.line() == "sent"
        assert torch.equal(receiver.receive(0, PATIENCE_S), torch.zeros(300_000))
        wait_for_the_next(receiver)
        peer.kill()
        began = time.monotonic()
        assert torch.equal(receiver.receive(0, PATIENCE_S), torch.ones(300_000)), "it had arrived"
        with pytest.raises(ChannelClosed, match=r"channel 'activations' from stages/0: .*(killed|lost)"):
            receiver.receive(0)
        assert time.monotonic() - began < PROMPT_S
    hub.close("done")


def test_a_child_that_a_killed_sender_has_forked_does_not_keep_the_channel_open(endpoint: str, kind: str) -> None:
    """A data loader's worker, which did: the receiver waited for as long as that lived."""
    hub = ChannelHub(endpoint, "stages/1")
    receiver = hub.receiver("activations")
    with Peer(FORKING, hub.endpoint, kind) as peer:
        receiver.receive(0, PATIENCE_S)
        peer.go()
        assert peer.line() == "forked"
        peer.kill()
        with pytest.raises(ChannelClosed, match=r"channel 'activations' from stages/0: .*(killed|lost)"):
            receiver.receive(0, PATIENCE_S)
    hub.close("done")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gloo"], indirect=True)
def test_a_sender_that_is_killed_in_the_middle_of_a_message_ends_its_receive(endpoint: str) -> None:
    """gloo itself would let the receiver wait for half an hour: a thread of ours does, until its process ends."""
    with Peer(HEARING_OF_A_DEATH, endpoint) as hearing, Peer(DYING, hearing.line()) as dying:
        assert hearing.line() == "the first"
        dying.go()
        told = hearing.line()
    assert re.match(r"channel 'activations' from stages/0: .*(killed|lost)", told)


@pytest.mark.parametrize("kind", ["gloo"], indirect=True)
def test_the_end_of_a_sender_is_noticed_while_a_value_that_nobody_wants_is_on_its_way(endpoint: str) -> None:
    """Regression: the reading thread waited half an hour for the rest of the value before it noticed the end."""
    hub = ChannelHub(endpoint, "stages/1")
    receiver = hub.receiver("activations")
    with Peer(CUT_OFF, hub.endpoint) as peer:
        receiver.receive(0, PATIENCE_S)
        receiver.abort(1, "given up")
        peer.go()
        with pytest.raises(ChannelClosed, match="from stages/0: cut off"):
            receiver.receive(2, PATIENCE_S)
        hub.close("done")


def test_a_killed_receiver_ends_a_blocked_send(endpoint: str, kind: str) -> None:
    with Peer(RECEIVING, endpoint) as peer:
        sender = open_sender(peer.line(), "activations", kind=kind, name="stages/0", peer="stages/1")
        for _ in range(3):
            sender.send(0, torch.ones(300_000))
        assert peer.line() == "300000.0"
        outcome: Future[float] = Future()

        def send_one_too_many() -> None:
            try:
                sender.send(0, torch.ones(300_000))
            except ChannelClosed as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(0.0)

        threading.Thread(target=send_one_too_many, daemon=True).start()
        with pytest.raises(TimeoutError):
            outcome.result(0.05)
        peer.kill()
        with pytest.raises(ChannelClosed, match=r"channel 'activations' to stages/1: .*(killed|lost|broke)"):
            outcome.result(PROMPT_S)
