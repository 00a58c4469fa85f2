"""Servers of a run on several hosts: a name for clients, a unix socket for the own host, mTLS for the others."""

import dataclasses
import errno
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

import lp_pipe as lp
from lp_pipe import connections
from lp_pipe.channels import kinds
from lp_pipe.connections import Connection, run_endpoints
from lp_pipe.connections.credentials import generate_credentials
from lp_pipe.connections.grpc_stream import GrpcConnection
from lp_pipe.connections.tls import TlsConnection
from lp_pipe.connections.unix import UnixConnection
from lp_pipe.errors import Unauthenticated

NAME = "name:some-run/server"


class Directory:
    """The launcher's directory of servers."""

    def __init__(self) -> None:
        self.endpoints: dict[str, str] = {}

    def find(self, address: str) -> "Future[str]":
        found: Future[str] = Future()
        if address in self.endpoints:
            found.set_result(self.endpoints[address])
        else:
            found.set_exception(lp.Unavailable(f"nobody listens yet at {address}"))
        return found


@pytest.fixture
def directory() -> Directory:
    return Directory()


@pytest.fixture
def member(directory: Directory, socket_home: Path) -> Iterator[run_endpoints.RunMember]:
    """Let this process serve in the run, on host a."""
    made = run_endpoints.RunMember(
        "some-run", "a", generate_credentials(), directory.find, str(socket_home), "tls:127.0.0.1"
    )
    run_endpoints.join(made)
    yield made
    run_endpoints.leave("some-run")
    run_endpoints._left.discard("some-run")


def listening(accepted: list[Connection], directory: Directory, name: str = NAME) -> connections.Listener:
    listener = connections.listen(name, accepted.append)
    directory.endpoints["server"] = run_endpoints.endpoint_to_register(listener.endpoint)
    return listener


def test_a_server_is_found_by_its_name_and_reached_as_fits_the_host(
    member: run_endpoints.RunMember, directory: Directory
) -> None:
    with pytest.raises(lp.Unavailable, match="nobody listens yet at server"):
        connections.connect(NAME)
    accepted: list[Connection] = []
    listener = listening(accepted, directory)
    assert listener.endpoint == NAME
    near = connections.connect(NAME)
    run_endpoints.join(dataclasses.replace(member, host="b"))  # as on another host
    far = connections.connect(NAME)
    assert isinstance(near, UnixConnection) and not isinstance(far, UnixConnection)
    for connection in (near, far):
        connection.close()
    listener.close()


def test_one_that_has_started_again_is_found_at_its_new_port(
    member: run_endpoints.RunMember, directory: Directory
) -> None:
    accepted: list[Connection] = []
    listening(accepted, directory).close()
    first = directory.endpoints["server"]
    with pytest.raises(lp.Unavailable):
        connections.connect(NAME)
    again = listening(accepted, directory)
    assert directory.endpoints["server"] != first
    connections.connect(NAME).close()
    again.close()


def test_channels_take_the_way_that_fits_both_hosts(member: run_endpoints.RunMember, directory: Directory) -> None:
    listener = listening([], directory)
    endpoint = directory.endpoints["server"]
    assert kinds.choose("auto", endpoint).name == "shm"
    assert kinds.named("shm").sender_endpoint(endpoint) == endpoint
    over_the_network = connections.connect(kinds.named("tls").sender_endpoint(endpoint))  # asked for, on one host
    assert isinstance(over_the_network, TlsConnection)
    over_the_network.close()
    run_endpoints.join(dataclasses.replace(member, host="b"))
    assert kinds.choose("auto", endpoint).name == kinds.choose("tls", endpoint).name == "tls"
    with pytest.raises(ValueError, match=r"'grpc' does not fit a node on another host \(a\)"):
        kinds.choose("grpc", endpoint)
    # It showed the run, socket and port of the endpoint, behind which what could be used was cut off.
    with pytest.raises(ValueError, match=r"'shm' does not fit a node on another host \(a\): use one of 'auto'"):
        kinds.choose("shm", endpoint)
    listener.close()


@pytest.mark.parametrize("is_asked_for", [True, False], ids=["by the channel", "by the run"])
def test_grpc_is_grpc(member: run_endpoints.RunMember, directory: Directory, is_asked_for: bool) -> None:
    # channel="grpc" between hosts was TLS sockets.
    if not is_asked_for:
        run_endpoints.join(dataclasses.replace(member, reached_at="grpcs:127.0.0.1"))
    listener = listening([], directory, kinds.named("grpc").hub_endpoint(NAME) if is_asked_for else NAME)
    assert listener.endpoint == NAME
    endpoint = directory.endpoints["server"]
    assert run_endpoints.HostEndpoint.of(endpoint).far_endpoint.startswith("grpcs:127.0.0.1:")
    with pytest.raises(ValueError, match=r"'tls' does not fit a node on this host \(a\)"):
        kinds.choose("tls", endpoint)
    run_endpoints.join(dataclasses.replace(member, host="b"))
    assert kinds.choose("auto", endpoint).name == kinds.choose("grpc", endpoint).name == "grpc"
    connection = connections.connect(NAME)
    assert isinstance(connection, GrpcConnection)
    connection.close()
    listener.close()


@pytest.mark.parametrize("error", [TimeoutError("timed out"), OSError(errno.EHOSTUNREACH, "No route to host")], ids=str)
def test_a_host_that_another_one_does_not_reach_is_named_with_what_to_do(
    member: run_endpoints.RunMember, directory: Directory, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    # A firewall between two hosts was "nobody listens at tls:…: timed out" of a stage that was well.
    def connect(*_: object, **__: object) -> socket.socket:
        raise error

    listener = listening([], directory)
    run_endpoints.join(dataclasses.replace(member, host="h2/4711"))
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(lp.Unavailable, match=r"^host h2 does not reach a at \S+:\d+ \(.*\): a firewall\? --interface"):
        connections.connect(NAME)
    listener.close()


def test_a_process_of_another_run_is_told_so_and_does_not_wait(member: run_endpoints.RunMember) -> None:
    with pytest.raises(Unauthenticated, match="does not belong to run other"):
        lp.CourierClient("name:other/server").anything()


def test_after_the_end_nobody_is_reached(member: run_endpoints.RunMember, directory: Directory) -> None:
    listener = listening([], directory)
    run_endpoints.leave("some-run")
    with pytest.raises(lp.Unavailable, match="run some-run has ended"):
        connections.connect(NAME)
    listener.close()
