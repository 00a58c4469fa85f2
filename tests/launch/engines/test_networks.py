"""Which way tensors take between hosts, and what is said when there is none: hosts in namespaces, with real sshd."""

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.launch.dry_run import planned
from lp_pipe.launch.engines import SshEngine
from tests.launch.engines import namespaces
from tests.launch.engines.programs import WITHIN_S, probes, trained, until

pytestmark = [
    pytest.mark.multihost,
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "there are hosts"),
]

WIDTH, BATCH = 64, 512
CHANNEL_PATIENCE_S = 25.0  # a ping every 10 s, and as long for its answer; then 5 s for what had been sent


def _clean(made: namespaces.Hosts) -> Iterator[namespaces.Hosts]:
    yield made
    try:
        until(lambda: not any(made.pids(name) for name in made.names), within_s=15)
    finally:
        made.close()


@pytest.fixture(scope="module")
def hosts() -> Iterator[namespaces.Hosts]:
    """With two networks."""
    yield from _clean(namespaces.Hosts(2, is_doubled=True))


@pytest.fixture
def ipv6_hosts() -> Iterator[namespaces.Hosts]:
    yield from _clean(namespaces.Hosts(2, is_ipv6=True))


@pytest.fixture
def doomed_hosts() -> Iterator[namespaces.Hosts]:
    yield from _clean(namespaces.Hosts(2))


def engine(hosts: namespaces.Hosts) -> SshEngine:
    return SshEngine(",".join(hosts.names), ssh_config=hosts.ssh_config, python=hosts.python)


def wide_pipeline(channel: str) -> tuple[lp.Program, pp.PipelineHandle]:
    """Of two stages; a step sends 128 KiB each way."""
    model = pp.Model(
        [pp.Layer(torch.nn.Linear, WIDTH, WIDTH), pp.Layer(torch.nn.Linear, WIDTH, WIDTH)],
        torch.nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    program = lp.Program("wide")
    return program, pp.add_pipeline(program, model, stages=2, microbatches=4, channel=channel)


def step(client: Any) -> None:
    client.step((torch.ones(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)))


def test_a_pipeline_over_gloo_between_hosts_has_the_parameters_of_process_mode(hosts: namespaces.Hosts) -> None:
    assert trained("multi_host", "gloo", engine=engine(hosts)) == trained("process")


@pytest.mark.parametrize("channel", ["auto", "gloo"])
def test_tensors_take_the_interface_that_is_asked_for(hosts: namespaces.Hosts, channel: str) -> None:
    program, handle = wide_pipeline(channel)
    with lp.launch(program, "multi_host", engine=engine(hosts), interface="eth1") as run:
        client = run.client(handle)
        step(client)  # the channels connect
        before = {device: hosts.received_bytes("h2", device) for device in ("eth0", "eth1")}
        for _ in range(8):
            step(client)
        received = {device: hosts.received_bytes("h2", device) - before[device] for device in before}
    activations = 8 * BATCH * WIDTH * 4
    assert received["eth1"] > activations
    assert received["eth0"] < activations / 4, "supervision only"


def test_an_interface_that_a_host_does_not_have_is_named(hosts: namespaces.Hosts) -> None:
    with pytest.raises(lp.LaunchError, match=r"--interface=eth7: host h\d has no such interface \(it has lo, eth"):
        lp.launch(probes(), "multi_host", engine=engine(hosts), interface="eth7")


def test_a_dry_run_says_what_each_edge_will_be(hosts: namespaces.Hosts, tmp_path: Any) -> None:
    for channel, expected in (("auto", "channel grpc"), ("gloo", "channel gloo (not encrypted)")):
        lines = planned(wide_pipeline(channel)[0], "multi_host", tmp_path, engine=engine(hosts))
        assert f"stages/0 -> stages/1  {expected}" in lines


@pytest.mark.parametrize("channel", ["auto", "gloo"])
def test_hosts_that_have_ipv6_only(ipv6_hosts: namespaces.Hosts, channel: str) -> None:
    assert trained("multi_host", channel, engine=engine(ipv6_hosts)) == trained("thread")


@pytest.mark.parametrize("channel", ["auto", "gloo"])
def test_an_interface_may_have_ipv6_only(ipv6_hosts: namespaces.Hosts, channel: str) -> None:
    assert trained("multi_host", channel, engine=engine(ipv6_hosts), interface="eth0") == trained("thread")


@pytest.mark.parametrize("channel", ["grpc", "gloo"])
def test_a_link_that_is_cut_between_hosts_ends_the_step_with_a_reason(
    doomed_hosts: namespaces.Hosts, channel: str
) -> None:
    program, handle = wide_pipeline(channel)
    run = lp.launch(program, "multi_host", engine=engine(doomed_hosts))
    client = run.client(handle)
    step(client)
    doomed_hosts.part()
    cut = time.monotonic()
    with pytest.raises(Exception) as raised:  # which stage's, and so of which kind, is open
        step(client)
    assert time.monotonic() - cut < CHANNEL_PATIENCE_S + WITHIN_S / 3
    assert re.search(r"channel '.*' (from|to) stages/[01]: .*(lost|ended|out of reach)", str(raised.value))
    run.stop()
