"""Pretend hosts on one machine: namespaces joined by a bridge, each with its own address, processes, /tmp and sshd."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PROGRAMS = ("ip", "bridge", "tc", "nsenter", "unshare", "ssh", "ssh-keygen", "/usr/sbin/sshd")
_SSHD = """\
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/id.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
UseDNS no
PidFile none
PrintMotd no
MaxStartups 100
"""
_SSH = """\
Host {name}
  HostName {address}
  User root
  IdentityFile {folder}/id
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
# The first process of a host: it reaps what is left of others.
_INIT = """\
set -e
mount -t proc proc /proc
hostname {name}
mount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm; chmod 1777 /tmp /dev/shm
mkdir -p /run/sshd
cd /
/usr/sbin/sshd -D -e -f {folder}/sshd_{name} & wait $!
"""


_numbers = itertools.count()
_LETTERS = "abcdefgh"


def why_not() -> str:
    """Return why there can be no such hosts here, or an empty string."""
    if os.geteuid() != 0:
        return "pretend hosts need root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


class Hosts:
    """`h1`, `h2`, … from construction until `close`; the machine itself is the host beside them.

    is_ipv6: they have IPv6 addresses only. is_doubled: a second network, `eth1`, joins them and the machine as well.
    ssh_config: for `ssh -F`. python: this interpreter, with this checkout's lp_pipe, on every host.
    """

    def __init__(self, count: int, *, is_ipv6: bool = False, is_doubled: bool = False) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="lp-hosts-", dir="/run"))  # not /tmp, of which each has its own
        number = next(_numbers) % len(_LETTERS)  # they are used again: so many are never there at a time
        self._mark = f"lp{os.getpid() % 100_000}{_LETTERS[number]}"
        self._nets = _networks(os.getpid(), number, is_ipv6=is_ipv6)[: 2 if is_doubled else 1]
        self._inits: list[subprocess.Popen[bytes]] = []
        self._wires: list[Wire] = []
        self.names = [f"h{number}" for number in range(1, count + 1)]
        self.ssh_config = str(self._folder / "ssh_config")
        self.python = str(self._folder / "python")
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def address(self, name: str) -> str:
        return f"{self._nets[0]}{self.names.index(name) + 1}"

    def cut(self, name: str) -> None:
        """Cut the connection silently: neither end gets a FIN or RST."""
        _run("ip", "-n", self._netns(name), "link", "set", "eth0", "down")

    def part(self) -> None:
        """Let the hosts reach only the machine, and no longer each other."""
        for name in self.names:
            _run("bridge", "link", "set", "dev", f"{self._mark}{name}e0", "isolated", "on")

    def slow_down(self, name: str, bytes_per_s: int) -> None:
        """Slow down what the host sends from now on."""
        rate = ("rate", f"{8 * bytes_per_s}bit", "burst", "64kb", "latency", "200ms")
        _run("tc", "-n", self._netns(name), "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)

    def received_bytes(self, name: str, device: str) -> int:
        shown = _run("ip", "-n", self._netns(name), "-j", "-s", "link", "show", "dev", device)
        return int(json.loads(shown)[0]["stats64"]["rx"]["bytes"])

    def mend(self, name: str) -> None:
        """The link is back, and what waited to be sent again comes through."""
        _run("ip", "-n", self._netns(name), "link", "set", "eth0", "up")

    def kill(self, name: str) -> None:
        """The host dies with all that runs on it."""
        init = self._inits[self.names.index(name)]
        init.kill()
        init.wait()

    def wire(self, name: str) -> "Wire":
        """Replace the host's cable by one that can be made slow, lossy, or one-way."""
        netns = self._netns(name)
        (link,) = json.loads(_run("ip", "-n", netns, "-j", "link", "show", "eth0"))
        _run("ip", "-n", netns, "link", "del", "eth0")
        # A host keeps its card: with another hardware address the others would go on calling the old one for a while.
        made = Wire(f"{self._mark}br0", netns, "eth0", link["address"], f"{self.address(name)}/24")
        self._wires.append(made)
        self._wait_for_sshd(name)
        return made

    def pids(self, name: str) -> list[int]:
        """The processes of a host, without those that make it one."""
        found = _run("ip", "netns", "pids", self._netns(name)).split()
        return [int(pid) for pid in found if not _is_part_of_host(int(pid))]

    def close(self) -> None:
        """Remove everything that the constructor made."""
        for wire in self._wires:
            wire.close()
        for init in self._inits:
            init.kill()  # unshare --kill-child takes the host's first process, and so the host, with it
            init.wait()
        for name in self.names:
            self._empty(name)
            # By themselves they go with the namespace, which lives as long as the last TCP socket that was cut off.
            for index in range(len(self._nets)):
                _run("ip", "link", "del", f"{self._mark}{name}e{index}", check=False)
            _run("ip", "netns", "del", self._netns(name), check=False)
        for index in range(len(self._nets)):
            _run("ip", "link", "del", f"{self._mark}br{index}", check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _make(self) -> None:
        for key in ("host_key", "id"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / key))
        repository = Path(__file__).parents[3]
        python = Path(self.python)
        python.write_text(f'#!/bin/sh\nPYTHONPATH={repository} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        for index, net in enumerate(self._nets):
            bridge = f"{self._mark}br{index}"
            _run("ip", "link", "add", bridge, "type", "bridge")
            _add_address(f"{net}254", bridge)
            _run("ip", "link", "set", bridge, "up")
        with open(self.ssh_config, "w", encoding="utf-8") as config:
            for name in self.names:
                config.write(_SSH.format(name=name, address=self.address(name), folder=self._folder))
                self._start(name)
        for name in self.names:
            self._wait_for_sshd(name)

    def _start(self, name: str) -> None:
        netns = self._netns(name)
        _run("ip", "netns", "add", netns)
        _run("ip", "-n", netns, "link", "set", "lo", "up")
        for index, net in enumerate(self._nets):
            cable, device = f"{self._mark}{name}e{index}", f"eth{index}"
            _run("ip", "link", "add", cable, "type", "veth", "peer", "name", device, "netns", netns)
            _run("ip", "link", "set", cable, "master", f"{self._mark}br{index}", "up")
            _add_address(f"{net}{self.names.index(name) + 1}", device, "-n", netns)
            _run("ip", "-n", netns, "link", "set", device, "up")
        sshd = _SSHD.format(address=self.address(name), folder=self._folder)
        (self._folder / f"sshd_{name}").write_text(sshd, encoding="utf-8")
        unshare = [
            "unshare",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
            "--propagation",
            "private",
        ]
        init = ["bash", "-c", _INIT.format(name=name, folder=self._folder)]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._inits.append(
                subprocess.Popen(
                    ["nsenter", f"--net=/run/netns/{netns}", *unshare, *init],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _wait_for_sshd(self, name: str) -> None:
        deadline = time.monotonic() + 10
        ask = ["ssh", "-F", self.ssh_config, "-o", "ConnectTimeout=5", name, "true"]
        while subprocess.run(ask, capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline, (self._folder / f"{name}.log").read_text()
            time.sleep(0.05)

    def _empty(self, name: str) -> None:
        deadline = time.monotonic() + 5
        while pids := _run("ip", "netns", "pids", self._netns(name), check=False).split():
            assert time.monotonic() < deadline, f"processes of {name} do not end: {pids}"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)

    def _netns(self, name: str) -> str:
        return f"{self._mark}-{name}"


def _networks(pid: int, number: int, *, is_ipv6: bool) -> list[str]:
    """Return how the addresses of each network begin."""
    if is_ipv6:
        return [f"fd4c:{pid & 0xFFFF:x}:{number}:{index}::" for index in range(2)]
    third = (pid // 128 * 8 + number) % 256
    return [f"10.{64 + pid % 128}.{third}.", f"100.{64 + pid % 64}.{third}."]


def _add_address(address: str, device: str, *where: str) -> None:
    """nodad: an IPv6 address could not be bound at once."""
    size = ["/64", "nodad"] if ":" in address else ["/24"]
    _run("ip", *where, "addr", "add", f"{address}{size[0]}", "dev", device, *size[1:])


class Wire:
    """A process that carries the packets of a host; see wire.py for what it can be told."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("wire.py")), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._wait()

    def tell(self, *commands: str) -> int:
        """Returns once it is done, with the number of packets that were lost or delayed before."""
        assert self._process.stdin is not None
        hits = 0
        for command in commands:
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()
            hits += self._wait()
        return hits

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _wait(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the wire has ended; its error is above"
        return int(line)


def _is_part_of_host(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True  # it has just ended
    return not command or command.startswith((b"bash\0-c\0set -e", b"sshd:", b"/usr/sbin/sshd", b"unshare"))


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
