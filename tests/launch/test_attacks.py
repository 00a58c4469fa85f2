"""Strangers at every port of a program on several hosts: they are thrown out, run nothing, and the program goes on."""

import contextlib
import dataclasses
import os
import pickle
import re
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest

import lp_pipe as lp
from lp_pipe.connections import Frame, frames, grpc_stream
from lp_pipe.connections.credentials import Credentials, generate_credentials
from lp_pipe.connections.tcp_endpoint import SECURE
from lp_pipe.connections.tls_acceptor import GREETING, MAGIC
from lp_pipe.launch.processes import template
from lp_pipe.testing import assert_no_leaks
from tests.launch import strangers
from tests.launch.attacked import Confiding, Target, lone_account, under_attack
from tests.launch.strangers import WITHIN_S, Stream, call_with_bomb, random_strings, through_tls, throw
from tests.waiting import until

NO_GREETING = GREETING.pack(MAGIC, 2) + b"xx"
HALF_A_FRAME = b"".join(frames.encode(Frame(frames.CALL, 1, "pay", b"x" * 100)))[:60]


@pytest.fixture(scope="module")
def shared_target() -> Iterator[Target]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template, "_WORTH_PRELOADING", ())  # see `without_torch`
        with assert_no_leaks(), under_attack(Confiding("2")) as target:
            yield target


@pytest.fixture
def target(shared_target: Target) -> Iterator[Target]:
    before = shared_target.paid()
    yield shared_target
    assert shared_target.answer_s() < 5.0
    until(lambda: shared_target.paid() > before)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Return the file that a bomb makes where it explodes."""
    return tmp_path / "mark"


# What there is to attack.


def test_only_the_servers_of_nodes_listen_and_only_as_the_run_needs(target: Target) -> None:
    assert len(target.ports) == 2
    listening = set(strangers.ports_of(target.processes)) - target.ports_before
    assert listening == set(target.ports)  # no agent, and no launcher any more
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", target.engine.launcher_port), WITHIN_S)


def test_who_has_certificate_and_token_can_run_code(target: Target, mark: Path) -> None:
    stream = Stream(target.ports[0], target.ours, call_with_bomb(mark, "ask"))
    assert stream.is_welcome()
    until(mark.exists)  # so the tests below would see it
    stream.close()


# Without credentials.


def test_ten_thousand_random_strings_at_every_port_change_nothing(target: Target) -> None:
    with ThreadPoolExecutor(2) as pool:
        answered = list(pool.map(lambda port: throw(port, random_strings(10_000, seed=port)), target.ports))
    assert max(answered) < 100  # an alert of TLS at most
    until(lambda: "has refused" in target.log("account"))


@pytest.mark.parametrize("shown", ["no certificate", "another authority's"])
def test_without_the_runs_certificate_nobody_is_listened_to(target: Target, mark: Path, shown: str) -> None:
    certificate = None if shown == "no certificate" else generate_credentials()
    for port in target.ports:
        assert through_tls(port, certificate, NO_GREETING + call_with_bomb(mark, "ask")) == b""
        assert throw(port, [call_with_bomb(mark, "ask")]) < 100  # nor without TLS
    assert not mark.exists()


def test_half_handshakes_by_the_hundred_keep_nobody_waiting(target: Target) -> None:
    hello = strangers.client_hello()
    with contextlib.ExitStack() as stack:
        for port in target.ports:
            for beginning in (b"", hello[:1], hello[:100]):
                stack.enter_context(strangers.held_open(port, 100, beginning))
        assert target.answer_s() < 5.0
        late = Stream(target.ports[0], target.ours, b"")
        assert late.is_welcome()  # who belongs to the run still gets in
        late.close()


@pytest.mark.slow
def test_half_handshakes_are_thrown_out_after_ten_seconds(target: Target) -> None:
    before = strangers.open_descriptors(target.pids[0])
    with strangers.held_open(target.ports[0], 200, strangers.client_hello()[:100]) as socks:
        began = time.monotonic()
        for sock in socks:
            strangers._answered(sock)
        assert 5.0 < time.monotonic() - began < WITHIN_S
    assert strangers.open_descriptors(target.pids[0]) <= before + 10


@pytest.fixture(scope="module")
def grpc_target() -> Iterator[Target]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template, "_WORTH_PRELOADING", ())
        with assert_no_leaks(), under_attack(Confiding("2"), "grpc") as target:
            yield target


def test_a_grpc_port_refuses_strangers_and_runs_nothing_of_theirs(grpc_target: Target, mark: Path) -> None:
    bomb = call_with_bomb(mark, "ask")
    for port in grpc_target.ports:
        throw(port, random_strings(1000, seed=port))
        for shown in (None, generate_credentials()):
            assert through_tls(port, shown, bomb) == b""
        through_tls(port, grpc_target.ours, bomb)  # no HTTP/2
        wrong = dataclasses.replace(grpc_target.ours, token="0" * 64)
        for credentials in (generate_credentials(), wrong):
            with pytest.raises(lp.Unavailable):
                call_by_grpc(port, credentials, mark)
    assert grpc_target.answer_s() < 5.0
    assert not mark.exists()
    call_by_grpc(grpc_target.ports[0], grpc_target.ours, mark)  # of the run: it may run code
    until(mark.exists)


def call_by_grpc(port: int, credentials: Credentials, mark: Path) -> None:
    """Send a call with a bomb, and wait until it is answered, or raise Unavailable."""
    connection = grpc_stream.connect(f"{SECURE}127.0.0.1:{port}", None, credentials)
    answers: SimpleQueue[str] = SimpleQueue()
    connection.start(lambda frame: answers.put(""), answers.put)
    with contextlib.closing(connection):
        connection.send(Frame(frames.CALL, 1, "ask", pickle.dumps(((strangers.Bomb(mark),), {}))))
        if reason := answers.get(timeout=WITHIN_S):
            raise lp.Unavailable(reason)


@pytest.mark.parametrize("name", ["target", "grpc_target"])
def test_two_thousand_half_open_connections_keep_nobody_waiting(
    name: str, request: pytest.FixtureRequest, many_descriptors: None
) -> None:
    target: Target = request.getfixturevalue(name)
    hello = strangers.client_hello()[:100]
    with contextlib.ExitStack() as stack:
        for port in target.ports:
            stack.enter_context(strangers.held_open(port, 2000, hello))
        assert target.answer_s() < 5.0
        assert target.run.client("account").ask(os.getpid) == target.pids[0]  # also over a new connection


# With the certificate of the run, and nothing more.


@pytest.mark.parametrize("token", ["0" * 64, "", "x" * 4000], ids=["wrong", "none", "long"])
def test_without_the_token_nothing_that_is_sent_is_read(target: Target, mark: Path, token: str) -> None:
    refused_before = target.log("account").count("has refused")
    for message in (call_with_bomb(mark, "ask"), HALF_A_FRAME, b"x" * (1 << 20), os.urandom(1000)):
        stream = Stream(target.ports[0], target.ours, message, token)
        assert not stream.is_welcome() and len(stream.end()) < 100  # at most why
        stream.close()
    assert not mark.exists()
    if token == "0" * 64:
        until(lambda: target.log("account").count("has refused") > refused_before)


def test_random_strings_inside_tls_change_nothing(target: Target, mark: Path) -> None:
    bomb = call_with_bomb(mark, "ask")
    for data in [bomb, NO_GREETING + bomb, *(NO_GREETING + text for text in random_strings(30, seed=1) if text)]:
        through_tls(target.ports[0], target.ours, data)
    assert not mark.exists()


def test_our_own_peers_speak_tls_1_3_and_the_server_has_the_runs_name(target: Target) -> None:
    context = strangers.tls_context(target.ours)
    context.load_verify_locations(cadata=target.ours.authority.decode())
    context.verify_mode, context.check_hostname = strangers.ssl.CERT_REQUIRED, True
    with (
        socket.create_connection(("127.0.0.1", target.ports[0]), WITHIN_S) as sock,
        context.wrap_socket(sock, server_hostname="lp-pipe.run") as tls,
    ):
        assert tls.version() == "TLSv1.3"


# From inside: what a broken peer of the run may send.


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\x7f" + b"x" * 100, b"x" * (1 << 20), os.urandom(5000)],
    ids=["a header of 2 GiB", "a message of 1 MiB", "random"],
)
def test_what_is_no_frame_ends_only_its_own_connection(target: Target, data: bytes) -> None:
    stream = Stream(target.ports[0], target.ours, data)
    assert stream.is_welcome()
    stream.end()
    stream.close()


def test_a_frame_that_announces_much_costs_only_what_has_come(target: Target) -> None:
    # 8 GiB were taken, and filled with zeros, for each frame that announced them.
    head = frames._HEAD.pack(frames._FIXED.size, frames._VERSION, frames.CALL, 0, 1, 8 << 30)
    before = psutil.Process(target.pids[0]).memory_info().rss
    streams = [Stream(target.ports[0], target.ours, head + b"x" * 1000) for _ in range(3)]
    assert all(stream.is_welcome() for stream in streams)
    assert target.answer_s() < 5.0
    assert psutil.Process(target.pids[0]).memory_info().rss - before < 1 << 29
    for stream in streams:
        stream.close()


def test_half_frames_by_the_hundred_keep_nobody_waiting(target: Target) -> None:
    streams = [Stream(port, target.ours, HALF_A_FRAME) for port in target.ports for _ in range(50)]
    assert all(stream.is_welcome() for stream in streams)
    assert target.answer_s() < 5.0
    for stream in streams:
        stream.close()


# The launcher's own port, and a run that has ended.


class Besieged(Confiding):
    """An engine that attacks the launcher's port in all ways before the first agent comes."""

    mark: Path
    ports_before: set[int]

    def attack(self) -> None:
        port, bomb = self.launcher_port, call_with_bomb(self.mark, "start")
        assert throw(port, random_strings(10_000, seed=2)) < 100
        for shown in (None, generate_credentials()):
            assert through_tls(port, shown, NO_GREETING + bomb) == b""
        through_tls(port, self.ours, NO_GREETING + os.urandom(1000))
        for message in (bomb, HALF_A_FRAME, b"x" * (1 << 20)):
            stream = Stream(port, self.ours, message, token="0" * 64)
            assert not stream.is_welcome()
            stream.close()
        self.held = contextlib.ExitStack()  # until the end of the run
        for beginning in (b"", strangers.client_hello()[:100]):
            self.held.enter_context(strangers.held_open(port, 150, beginning))
        assert set(strangers.ports_of([os.getpid()])) - self.ports_before == {port}


def test_the_launchers_port_and_a_token_of_a_run_that_has_ended(
    target: Target, mark: Path, no_leaks: None, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Besieged("1")
    engine.mark, engine.ports_before = mark, set(strangers.ports_of([os.getpid()]))
    with lp.launch(lone_account(), "multi_host", engine=engine) as run:
        ended = run.client("account").ask(os.getpid)
        ports = [engine.launcher_port, *strangers.ports_of([ended])]
    engine.held.close()
    assert not mark.exists()
    assert re.search(r"[1-9] x 127\.0\.0\.1: it showed a wrong token", caplog.text)
    for port in ports:  # where it listened nobody does
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), WITHIN_S)
    for port in target.ports:  # and to another run its credentials are a stranger's
        stream = Stream(port, engine.ours, call_with_bomb(mark, "ask"))
        assert stream.end() == b""
        stream.close()
        stream = Stream(port, target.ours, call_with_bomb(mark, "ask"), token=engine.ours.token)
        assert not stream.is_welcome()
        stream.close()
    assert not mark.exists()


# Files, arguments, sockets.


def test_the_secret_is_in_no_file_no_argument_and_no_environment(target: Target) -> None:
    for text in strangers.proc_texts(psutil.pids()):
        assert not strangers.secrets_in(text, target.ours)
    for folder in (target.run.run_dir, Path(tempfile.gettempdir())):
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                assert not strangers.secrets_in(path.read_bytes(), target.ours), path


def test_unix_sockets_are_in_folders_of_this_user_alone(target: Target) -> None:
    found = listening_unix_sockets(target)
    assert len(found) >= 4  # a supervisor for each host, a server for each account
    for path in found:
        status = os.stat(os.path.dirname(path))
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o700, os.getuid())


def listening_unix_sockets(target: Target) -> list[str]:
    paths = {
        connection.laddr
        for pid in target.processes
        for connection in psutil.Process(pid).net_connections("unix")
        if connection.laddr and not connection.laddr.startswith("@")
    }
    return sorted(path for path in paths if os.path.exists(path))


OTHER_USER = """
import os, socket, sys
os.setgid(65534), os.setuid(65534)  # only now: the interpreter's own folder may be closed to others
for path in sys.argv[2:]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(path)
        try:
            sock.sendall(bytes.fromhex(sys.argv[1]))
            print(sock.recv(100))
        except ConnectionError:
            print(b"")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_even_where_the_folder_lets_him_in(target: Target, tmp_path: Path) -> None:
    mark = Path(f"/tmp/lp-mark-{os.getpid()}")  # of the process's own rights: anybody may write there
    paths = listening_unix_sockets(target)
    bomb = call_with_bomb(mark, "ask").hex()
    opened = {folder: stat.S_IMODE(os.stat(folder).st_mode) for path in paths for folder in _above(path)}
    try:
        for folder, mode in opened.items():
            os.chmod(folder, mode | 0o011)
        for path in paths:
            os.chmod(path, 0o777)
        command = [sys.executable, "-c", OTHER_USER, bomb, *paths]
        said = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S * 3)
    finally:
        for folder, mode in opened.items():
            os.chmod(folder, mode)
    assert said.stdout.split() == ["b''"] * len(paths), said.stderr
    assert not mark.exists()
    until(lambda: "it is of another user" in target.log("account"))


def _above(path: str) -> list[str]:
    return [str(folder) for folder in Path(path).parents if str(folder) not in ("/", "/tmp")]
