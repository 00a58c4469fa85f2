"""The ways of tensors between hosts, and the error when there is none: hosts in namespaces, with real sshd."""

import base64
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.connections.credentials import generate_credentials
from lp_pipe.errors import CheckpointError
from lp_pipe.launch.dry_run import describe_launch
from lp_pipe.launch.engines import SshEngine
from lp_pipe.launch.options import LaunchOptions
from tests.launch.engines import namespaces
from tests.launch.engines.programs import WITHIN_S, probes, trained
from tests.waiting import until

pytestmark = [
    pytest.mark.multihost,
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "there are hosts"),
]

WIDTH, BATCH = 64, 512
SILENT_LOSS_S = 4 / 3 * 7.0  # the usual host_timeout
OUT_OF_REACH_S = 15.0  # and the 5 s of the last try
LAST_BYTES_S = 5.0


def _clean(made: namespaces.Hosts) -> Iterator[namespaces.Hosts]:
    yield made
    try:
        until(lambda: not any(made.pids(name) for name in made.names), within_s=15)
    finally:
        made.close()


@pytest.fixture(scope="module")
def hosts() -> Iterator[namespaces.Hosts]:
    """Yield hosts with two networks."""
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
    """Return a pipeline of two stages whose steps send 128 KiB each way."""
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


def test_a_checkpoint_in_a_folder_that_each_host_has_for_itself_is_refused(hosts: namespaces.Hosts) -> None:
    program, handle = wide_pipeline("auto")
    with lp.launch(program, "multi_host", engine=engine(hosts)) as run, pytest.raises(CheckpointError, match="h1 does"):
        run.client(handle).save("/tmp")
    left = subprocess.run(["ssh", "-F", hosts.ssh_config, "h2", "ls /tmp/*.distcp"], capture_output=True, check=False)
    assert left.returncode == 2, left


def test_an_interface_that_a_host_does_not_have_is_named(hosts: namespaces.Hosts) -> None:
    with pytest.raises(lp.LaunchError, match=r"--interface=eth7: host h\d has no such interface \(it has lo, eth"):
        lp.launch(probes(), "multi_host", engine=engine(hosts), interface="eth7")


def test_a_dry_run_says_what_each_edge_will_be(hosts: namespaces.Hosts, tmp_path: Any) -> None:
    for channel, expected in (("auto", "channel tls"), ("gloo", "channel gloo (not encrypted)")):
        lines = describe_launch(wide_pipeline(channel)[0], "multi_host", tmp_path, LaunchOptions(engine=engine(hosts)))
        assert f"stages/0 -> stages/1  {expected}" in lines


@pytest.mark.parametrize("channel", ["auto", "gloo"])
def test_hosts_that_have_ipv6_only(ipv6_hosts: namespaces.Hosts, channel: str) -> None:
    assert trained("multi_host", channel, engine=engine(ipv6_hosts)) == trained("thread")


@pytest.mark.parametrize("channel", ["auto", "gloo"])
def test_an_interface_may_have_ipv6_only(ipv6_hosts: namespaces.Hosts, channel: str) -> None:
    assert trained("multi_host", channel, engine=engine(ipv6_hosts), interface="eth0") == trained("thread")


def test_a_pipeline_whose_link_is_cut_between_hosts_ends_its_step_with_a_reason(doomed_hosts: namespaces.Hosts) -> None:
    """The launcher still reaches both hosts, so that neither is lost."""
    program, handle = wide_pipeline("gloo")
    run = lp.launch(program, "multi_host", engine=engine(doomed_hosts))
    client = run.client(handle)
    step(client)
    doomed_hosts.part()
    cut = time.monotonic()
    with pytest.raises(lp.Unavailable, match=r"stages/[01].*unreachable"):
        step(client)
    assert time.monotonic() - cut < SILENT_LOSS_S + 3 * OUT_OF_REACH_S  # it takes a little less than 2 when quiet
    run.stop()
    run.wait(WITHIN_S)


def test_hosts_that_do_not_reach_each_other_are_named_with_what_to_do(doomed_hosts: namespaces.Hosts) -> None:
    doomed_hosts.part()
    with (
        pytest.raises(
            lp.NodeError, match=r"host h\d does not reach host h\d at 10\S+ \(.*\): a firewall\? --interface"
        ),
        lp.launch(wide_pipeline("auto")[0], "multi_host", engine=engine(doomed_hosts)) as run,
    ):
        run.wait(3 * OUT_OF_REACH_S)


HUB = """
import base64, sys, threading, time
import torch
from lp_pipe.channels import ChannelHub, open_sender
from lp_pipe.connections.credentials import Credentials, use_credentials
from lp_pipe.errors import ChannelClosed

use_credentials(Credentials.from_bytes(base64.b64decode(sys.stdin.readline())))
began = time.monotonic()

def until_it_ends(name, action):
    try:
        while True:
            action()
    except ChannelClosed as error:
        print(f"{name}: after {time.monotonic() - began:.0f} s: {error}", flush=True)
"""
RECEIVING = (
    HUB
    + """
hub = ChannelHub(f"grpcs:{sys.argv[1]}:0", "stages/1")
receivers = {name: hub.receiver(name, credits=1) for name in ("idle", "full", "midway")}
print(hub.endpoint, flush=True)
for name in ("idle", "full"):
    assert receivers[name].receive(0).numel() == 10
del receivers["full"]  # takes no more
threads = [threading.Thread(target=until_it_ends, args=(n, lambda r=r: r.receive(0))) for n, r in receivers.items()]
for thread in threads:
    thread.start()
sys.stdin.readline()
began = time.monotonic()
for thread in threads:
    thread.join()
"""
)
SENDING = (
    HUB
    + """
senders = {name: open_sender(sys.argv[1], name, kind="gloo", name="stages/0", peer="stages/1")
           for name in ("idle", "full", "midway")}
for name in ("idle", "full"):
    senders[name].send(0, torch.zeros(10))
full = threading.Thread(target=until_it_ends, args=("full", lambda: senders["full"].send(0, torch.zeros(10))))
full.start()
senders["midway"].send(0, torch.zeros(25 << 20))  # 100 MiB: ten seconds
print("sent", flush=True)
sys.stdin.readline()
began = time.monotonic()
full.join()
sys.stdin.readline()
for sender in senders.values():
    sender.close()
print("closed", flush=True)
"""
)


def test_a_cut_link_ends_whoever_waits_at_a_gloo_channel_with_a_reason(doomed_hosts: namespaces.Hosts) -> None:
    """Wait for a value, for the rest of one whose beginning is here, and for a credit."""
    secret = base64.b64encode(generate_credentials().to_bytes()).decode()
    doomed_hosts.slow_down("h1", 10 << 20)
    with (
        Party(doomed_hosts, "h2", RECEIVING, doomed_hosts.address("h2"), secret) as receiving,
        Party(doomed_hosts, "h1", SENDING, receiving.line(), secret) as sending,
    ):
        assert sending.line() == "sent"
        before = doomed_hosts.received_bytes("h2", "eth0")
        until(lambda: doomed_hosts.received_bytes("h2", "eth0") > before + (1 << 20))  # it is on its way
        doomed_hosts.part()
        receiving.say("cut")
        sending.say("cut")
        said = sorted([receiving.line(), receiving.line(), sending.line()])
        sending.say("close")
        assert sending.line() == "closed"
        assert sending.exit_status() == 0
    for line in said:
        pattern = r"(idle|full|midway): after (\d+) s: channel '\1' (to|from) stages/[01]: .*(unreachable|lost).*"
        found = re.fullmatch(pattern, line)
        assert found, line
        assert int(found[2]) < 4 / 3 * 10.0 + LAST_BYTES_S + 5
    assert [line.partition(":")[0] for line in said] == ["full", "idle", "midway"]


class Party:
    """A process on a host; its first line on stdin is the secret."""

    def __init__(self, hosts: namespaces.Hosts, host: str, code: str, argument: str, secret: str) -> None:
        command = shlex.join([hosts.python, "-c", code, argument])
        self._process = subprocess.Popen(
            ["ssh", "-F", hosts.ssh_config, host, command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.say(secret)

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def exit_status(self) -> int:
        return self._process.wait(WITHIN_S)

    def __enter__(self) -> "Party":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
