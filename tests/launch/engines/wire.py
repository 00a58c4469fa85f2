"""A cable between a bridge and a host, in user space: it may be slow, lose packets, or carry them one way only.

    python wire.py BRIDGE NETNS DEVICE MAC ADDRESS/BITS      (as root; one command a line on stdin)

    delay SECONDS    that a packet from the host takes (those to the host pass at once)
    loss SHARE       of the packets of each way, chosen by a random generator with a fixed seed
    carry both|in|out|none     what passes: in: to the host

Each is answered with the number of packets that were lost or delayed since the last one. Kernels need not have netem.
Ends, with its devices, when stdin does.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_INFO = 0x0002 | 0x1000
_IN, _OUT = "in", "out"


class Wire:
    """Frames wait in `_due` until their time has come; they never overtake each other."""

    def __init__(self, bridge: str, netns: str, device: str, mac: str, address: str) -> None:
        self._inside = _tap_in(netns, device)
        self._outside = _tap(f"{bridge[:11]}w{netns[-2:]}")
        _run("ip", "link", "set", f"{bridge[:11]}w{netns[-2:]}", "master", bridge, "up")
        _run("ip", "-n", netns, "link", "set", device, "address", mac)
        _run("ip", "-n", netns, "addr", "add", address, "dev", device)
        _run("ip", "-n", netns, "link", "set", device, "up")
        self._due: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._delay_s, self._loss, self._carries = 0.0, 0.0, (_IN, _OUT)
        self._random = random.Random(1)
        self._hits = 0

    def obey(self, command: str, value: str) -> None:
        if command == "delay":
            self._delay_s = float(value)
        elif command == "loss":
            self._loss = float(value)
        elif command == "carry":
            self._carries = {"both": (_IN, _OUT), "none": ()}.get(value, (value,))
        else:
            raise ValueError(f"unknown command {command!r}")

    def run(self) -> None:
        ways = {self._inside: (_OUT, self._outside), self._outside: (_IN, self._inside)}
        while True:
            wait_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            ready, _, _ = select.select([*ways, sys.stdin.fileno()], [], [], wait_s)
            for descriptor in ready:
                if descriptor in ways:
                    self._take(descriptor, *ways[descriptor])
                elif not self._ask():
                    return
            while self._due and self._due[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(self._due)
                _write(target, frame)

    def _ask(self) -> bool:
        line = os.read(sys.stdin.fileno(), 4096).decode()
        for command in line.splitlines():
            self.obey(*command.split())
            print(self._hits, flush=True)
            self._hits = 0
        return bool(line)

    def _take(self, source: int, way: str, target: int) -> None:
        try:
            frame = os.read(source, 1 << 16)
        except OSError:
            return  # the device is down
        is_lost = way not in self._carries or self._random.random() < self._loss
        self._hits += is_lost or (way == _OUT and self._delay_s > 0)
        if is_lost:
            return
        self._count += 1
        due = time.monotonic() + (self._delay_s if way == _OUT else 0.0)
        heapq.heappush(self._due, (due, self._count, target, frame))


def _tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_INFO))
    return descriptor


def _tap_in(netns: str, name: str) -> int:
    """A device belongs to the namespace of the process that makes it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as ours, open(f"/run/netns/{netns}") as theirs:
        _check(libc.setns(theirs.fileno(), _CLONE_NEWNET))
        try:
            return _tap(name)
        finally:
            _check(libc.setns(ours.fileno(), _CLONE_NEWNET))


def _write(target: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # the device is down, or its queue is full: lost, as on any cable
        os.write(target, frame)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), "setns")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    wire = Wire(*sys.argv[1:])
    print(0, flush=True)
    wire.run()
