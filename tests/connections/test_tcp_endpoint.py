"""The syntax of endpoints over TCP."""

import pytest

from lp_pipe.connections.tcp_endpoint import parse


@pytest.mark.parametrize(
    ("endpoint", "text", "target", "bind_target"),
    [
        ("grpc:127.0.0.1:80", "grpc:127.0.0.1:80", "127.0.0.1:80", "127.0.0.1:80"),
        ("grpc:localhost:0", "grpc:localhost:0", "localhost:0", "localhost:0"),
        ("grpc:[::1]:80", "grpc:[::1]:80", "[::1]:80", "[::1]:80"),
        ("tls:node17:80", "tls:node17:80", "node17:80", "node17:80"),
        ("grpcs:node17:80", "grpcs:node17:80", "node17:80", "node17:80"),
        ("grpcs:node17@0.0.0.0:0", "grpcs:node17:0", "node17:0", "0.0.0.0:0"),
        ("grpcs:node17@[::]:0", "grpcs:node17:0", "node17:0", "[::]:0"),
    ],
)
def test_an_endpoint_says_where_to_connect_and_where_to_bind(
    endpoint: str, text: str, target: str, bind_target: str
) -> None:
    found = parse(endpoint)
    assert (str(found), found.target, found.bind_target) == (text, target, bind_target)


@pytest.mark.parametrize(
    "endpoint", ["grpc:node17:0", "grpc:0.0.0.0:0", "grpc:127.0.0.1@0.0.0.0:0", "grpc:10.0.0.1:5", "grpc:[::]:0"]
)
def test_without_encryption_only_on_this_host(endpoint: str) -> None:
    with pytest.raises(ValueError, match="use tls:"):
        parse(endpoint)


@pytest.mark.parametrize("endpoint", ["grpcs:0.0.0.0:0", "tls:[::]:0"])
def test_a_listener_must_say_how_others_reach_it(endpoint: str) -> None:
    with pytest.raises(ValueError, match="NAME@"):
        parse(endpoint)


@pytest.mark.parametrize("endpoint", ["grpc:", "grpc:host", "grpc::80", "grpc:127.0.0.1:x", "grpc:[::1]:70000", "x"])
def test_anything_else_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="tls:HOST:PORT, grpc:HOST:PORT or grpcs:HOST:PORT"):
        parse(endpoint)


def test_a_token_of_its_own_is_for_clients_and_not_for_messages() -> None:
    found = parse("grpc:127.0.0.1:5000#secret")
    assert (str(found), found.with_token, found.token) == (
        "grpc:127.0.0.1:5000",
        "grpc:127.0.0.1:5000#secret",
        "secret",
    )
    with pytest.raises(ValueError, match="mTLS has no token of its own") as raised:
        parse("grpcs:node17:5000#secret")
    assert "secret" not in str(raised.value)
