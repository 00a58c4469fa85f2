"""The transport between hosts: with transport="grpc" all traffic is gRPC, with the same results."""

import contextlib
import dataclasses
import functools
import socket
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.launch.dry_run import describe_launch
from lp_pipe.launch.engines import KubernetesEngine
from lp_pipe.launch.engines.base import Invitation, StartedAgent
from lp_pipe.launch.engines.local import LocalEngine
from lp_pipe.launch.options import LaunchOptions

pytestmark = pytest.mark.usefixtures("no_leaks")

WITHIN_S = 60.0
BATCH = torch.arange(8.0).reshape(8, 1)


@pytest.fixture
def without_torch() -> None:
    """Let templates preload torch: otherwise each stage and the trainer need seconds to load it."""


def protocol_at(port: int) -> str | None:
    """Return what the listener chooses of HTTP/2: gRPC's servers say "h2", other TLS listeners nothing."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(("127.0.0.1", port), WITHIN_S) as plain, context.wrap_socket(plain) as secured:
        return secured.selected_alpn_protocol()


class ObservedEngine(LocalEngine):
    """The agents of two hosts, with what the launcher's own listener speaks while they join."""

    def start(self, invitation: Invitation) -> Sequence[StartedAgent]:
        self.port = int(invitation.addresses[0].rpartition(":")[2])
        self.protocol = protocol_at(self.port)
        return super().start(invitation)


class Trainer:
    def __init__(self, model: Any) -> None:
        self._model = model

    def train(self) -> list[float]:
        return [float(self._model.step((BATCH, 2 * BATCH)).loss) for _ in range(2)]


def program(channel: str = "auto") -> lp.Program:
    """Two stages and their trainer: calls, and channels between hosts."""
    layers = [pp.Layer(torch.nn.Linear, 1, 1), pp.Layer(torch.nn.Linear, 1, 1)]
    model = pp.Model(layers, torch.nn.functional.mse_loss, functools.partial(torch.optim.SGD, lr=1e-3))
    made = lp.Program("transport")
    pipeline = pp.add_pipeline(made, model, stages=2, channel=channel)
    made.add_node(lp.CourierNode(Trainer, pipeline), label="trainer")
    return made


def tcp_connections() -> Iterator[Any]:
    """Yield the connections of all processes of the run, of which this one is the launcher."""
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # one of an earlier run may end meanwhile
            yield from process.net_connections("tcp")


@pytest.mark.parametrize(("transport", "protocol"), [("grpc", "h2"), ("tls", None)])
def test_everything_between_hosts_goes_by_the_transport(transport: str, protocol: str | None) -> None:
    with lp.launch(program(), "thread") as run:
        expected = run.client("trainer").train()
    engine = ObservedEngine("2")
    before = {(found.laddr, found.raddr) for found in tcp_connections()}
    with lp.launch(program(), "multi_host", engine=engine, transport=transport) as run:
        assert run.client("trainer").train() == expected
        found = [one for one in tcp_connections() if (one.laddr, one.raddr) not in before]
        listening = {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}
        connected = [one for one in found if one.status == psutil.CONN_ESTABLISHED]
        assert engine.protocol == protocol
        assert {port: protocol_at(port) for port in listening} == dict.fromkeys(listening, protocol)
        assert len(listening) >= 3, "two stages and the trainer"
        ends = {frozenset((one.laddr.port, one.raddr.port)) for one in connected}
        assert len([ports for ports in ends if engine.port in ports]) == 2, "the agents' supervision"
        assert [ports for ports in ends if not ports & {engine.port, *listening}] == []


def test_agents_are_told_of_it() -> None:
    invitation = Invitation(["10.0.0.1:1"], b"very secret", "/tmp", transport="grpc")
    assert "--transport grpc" in " ".join(invitation.arguments("h1"))
    assert "--transport" not in dataclasses.replace(invitation, transport="tls").arguments("h1")


@pytest.mark.parametrize(("transport", "chosen"), [("auto", "tls"), ("tls", "tls"), ("grpc", "grpc")])
def test_a_dry_run_names_the_channels_that_it_gives(transport: str, chosen: str, tmp_path: Path) -> None:
    engine = KubernetesEngine("2", image="train:1")
    lines = describe_launch(program(), "multi_host", tmp_path, LaunchOptions(engine=engine, transport=transport))
    assert f"stages/0 -> stages/1  channel {chosen}" in lines


def test_a_channel_that_contradicts_it_is_refused(tmp_path: Path) -> None:
    engine = KubernetesEngine("2", image="train:1")
    with pytest.raises(ValueError, match=r"channel='tls' from stages/0 to stages/1 .*transport='grpc'"):
        describe_launch(program("tls"), "multi_host", tmp_path, LaunchOptions(engine=engine, transport="grpc"))


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_programs_on_one_host_have_neither_it_nor_tls_channels(mode: str) -> None:
    with pytest.raises(ValueError, match="transport"):
        lp.launch(program(), mode, transport="grpc")
    with pytest.raises(ValueError, match=r"stages/0 to stages/1 .*multi_host"):
        lp.launch(program("tls"), mode)


def test_one_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="transport='pigeon'"):
        lp.launch(program(), "multi_host", transport="pigeon")
