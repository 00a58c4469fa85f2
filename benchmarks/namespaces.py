"""Hosts in one machine: network namespaces joined by links of limited bandwidth. Needs root, ip and tc."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_TOOLS = ("ip", "tc", "nsenter")
_BURST = "64kb"
_LARGE_BURST = "256kb"  # with 64kb, tbf cuts what TCP sends at a time into packets: for 8 hosts that takes a whole core


class Host(NamedTuple):
    """A namespace, its end of the link, and its address there."""

    namespace: str
    device: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """The command that runs this one in there. Not `ip netns exec`, which mounts another /sys."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *arguments]

    def sent_bytes(self, header_bytes: int = 0) -> int:
        """Return the bytes at its end of the link. header_bytes: of each packet, which are not counted."""
        shown = _run(*self.command("ip", "-j", "-s", "link", "show", "dev", self.device))
        statistics: dict[str, Any] = json.loads(shown)[0]["stats64"]["tx"]
        return int(statistics["bytes"]) - header_bytes * int(statistics["packets"])

    def limit(self, bytes_per_s: float | None, burst: str = _BURST) -> None:
        """Limit what it sends from now on; None: no limit."""
        with contextlib.suppress(subprocess.CalledProcessError):  # there was no limit before
            _run(*self.command("tc", "qdisc", "del", "dev", self.device, "root"))
        if bytes_per_s is not None:
            rate = ("rate", f"{bytes_per_s * 8:.0f}bit", "burst", burst, "latency", "200ms")
            _run(*self.command("tc", "qdisc", "add", "dev", self.device, "root", "tbf", *rate))


def why_not() -> str:
    """Return why this machine allows no network namespaces; empty if it does."""
    if os.geteuid():
        return "this needs root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"there is no {', '.join(missing)} (package iproute2)" if missing else ""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create two namespaces with a link, and remove them when the body ends.

    Raises:
        CalledProcessError: this system does not allow them.
    """
    hosts = [Host(f"lpbench{os.getpid()}-{place}", f"lp{place}", f"10.213.7.{place}") for place in (1, 2)]
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
        ends = [("name", host.device, "netns", host.namespace) for host in hosts]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host in hosts:
            _run(*host.command("ip", "address", "add", f"{host.address}/24", "dev", host.device))
            for device in ("lo", host.device):
                _run(*host.command("ip", "link", "set", device, "up"))
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)


@contextlib.contextmanager
def hosts_on_a_switch(count: int, bytes_per_s: float) -> Iterator[list[Host]]:
    """Create namespaces that a switch joins; remove them at the end. Each sends at this rate at most.

    Limits of what each receives would cost another pass over all packets, and the machine's cores are the bottleneck.

    Raises:
        CalledProcessError: this system does not allow them.
    """
    mark = f"lpbench{os.getpid()}"
    switch = Host(f"{mark}-switch", "br0", "")
    hosts = [Host(f"{mark}-{place}", f"lp{place}", f"10.213.8.{place}") for place in range(1, count + 1)]
    try:
        for host in (switch, *hosts):
            _run("ip", "netns", "add", host.namespace)
        _run(*switch.command("ip", "link", "add", switch.device, "type", "bridge"))
        _run(*switch.command("ip", "link", "set", switch.device, "up"))
        for number, host in enumerate(hosts):
            port = Host(switch.namespace, f"port{number}", "")
            ends = [("name", end.device, "netns", end.namespace) for end in (host, port)]
            _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            _run(*port.command("ip", "link", "set", port.device, "master", switch.device, "up"))
            _run(*host.command("ip", "address", "add", f"{host.address}/24", "dev", host.device))
            for device in ("lo", host.device):
                _run(*host.command("ip", "link", "set", device, "up"))
            host.limit(bytes_per_s, _LARGE_BURST)
        yield hosts
    finally:
        for host in (*hosts, switch):
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)


@contextlib.contextmanager
def started_party(host: Host, module: str, job: dict[str, Any]) -> Iterator["subprocess.Popen[str]"]:
    """Start `python -m module --party` on a host, tell it its job, and kill it at the end."""
    environment = ("env", f"GLOO_SOCKET_IFNAME={host.device}", "CUDA_VISIBLE_DEVICES=")
    command = host.command(*environment, sys.executable, "-m", module, "--party")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            tell([process], json.dumps(job))
            yield process
        finally:
            process.kill()


def tell(parties: Sequence["subprocess.Popen[str]"], line: str) -> None:
    """Write a line to each party."""
    for one in parties:
        assert one.stdin is not None, "it is a pipe"
        one.stdin.write(line + "\n")
        one.stdin.flush()


def answers_of(parties: Sequence["subprocess.Popen[str]"]) -> list[str]:
    """Return the next line of each party.

    Raises:
        SystemExit: a party has ended.
    """
    found = []
    for one in parties:
        assert one.stdout is not None, "it is a pipe"
        found.append(one.stdout.readline().strip())
        if not found[-1]:
            raise SystemExit("a party has ended; its error is above")
    return found


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
