"""A channel to another process on the same GPU and one back, over a given kind."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from lp_pipe.channels import ChannelHub, open_sender

PATIENCE_S = 60.0  # NCCL takes seconds to connect
DEVICE = "cuda:0"
CREDITS = 4

_ANSWER = """
import sys, torch
from lp_pipe.channels import ChannelHub, open_sender
from lp_pipe.errors import ChannelClosed
own, other, kind, device = sys.argv[1:]
device = torch.device(device)
hub = ChannelHub(own, "stages/1")
receiver = hub.receiver("there", credits=4, device=device)
print(hub.endpoint, flush=True)
sender = open_sender(other, "back", kind=kind, name="stages/1", peer="stages/0", device=device)
try:
    while True:
        value = receiver.receive(0)
        if isinstance(value, str) and value == "compute":
            torch.cuda._sleep(20_000_000_000)  # ten seconds, which what follows waits for
            value = torch.ones(3, device=device)
        where = {str(leaf.device) for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)}
        sender.send(0, (value, sorted(where)))
        del value
except ChannelClosed as error:
    print("closed:", error, flush=True)
    sender.close("answered all")
"""

_numbers = itertools.count()


class Peer:
    """A process that sends back what it gets, with the devices of its tensors, or computes for long ("compute")."""

    def __init__(
        self, kind: str, directory: str, device: str = DEVICE, env: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        number = next(_numbers)
        self.hub = ChannelHub(f"unix:{directory}/{number}-0", "stages/0")
        self.receiver = self.hub.receiver("back", credits=CREDITS, device=torch.device(DEVICE))
        command = [sys.executable, "-c", _ANSWER, f"unix:{directory}/{number}-1", self.hub.endpoint, kind, device]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env})
        on_gpu = torch.device(DEVICE)
        self.sender = open_sender(self.line(), "there", kind=kind, name="stages/0", peer="stages/1", device=on_gpu)

    def line(self) -> str:
        """Return the peer's next line."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def answer(self) -> Any:
        return self.receiver.receive(0, PATIENCE_S)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Suspend the peer, which stays there."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *error: object) -> None:
        self.hub.close("the test is over")
        self.sender.close()
        self._process.kill()
        self._process.communicate()
