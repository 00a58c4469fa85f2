"""Who one rank is among the processes of its pipeline, and how it comes by channels to the others."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lp_pipe.address import Address
from lp_pipe.channels import kinds
from lp_pipe.channels.hub import ChannelHub
from lp_pipe.channels.receiver import Receiver
from lp_pipe.channels.sender import Sender
from lp_pipe.connections import inproc, unix
from lp_pipe.context import context
from lp_pipe.launch.processes.socket_dir import make_socket_dir
from lp_pipe.pipeline.config import Ranks
from lp_pipe.pipeline.worker.channel_handle import ChannelTarget
from lp_pipe.training.device import CPU


@dataclass(frozen=True)
class Neighbours:
    """Those of `rank`, which is the node `name` and computes on `device`.

    hub: where it receives. targets: by rank, where those receive to whom it sends. kind: of the channels. epoch: what
    tells their names from those before a neighbour was restarted.
    """

    ranks: Ranks
    rank: int
    name: str
    hub: ChannelHub
    targets: Mapping[int, ChannelTarget]
    kind: str
    device: torch.device = CPU
    epoch: str = ""

    @property
    def place(self) -> tuple[int, int]:
        """Worker and replica of this rank."""
        return self.ranks.places[self.rank]

    def receiver(self, label: str, credits: int) -> Receiver:
        """This end of a channel whose sender calls it so."""
        return self.hub.receiver(label + self.epoch, credits=credits, device=self.device)

    def sender(self, rank: int, label: str) -> Sender:
        """This end of a channel to another rank; waits until that one listens.

        Raises:
            Unavailable: it has failed.
            ValueError: this kind of channel does not fit.
        """
        return self.targets[rank].open(label + self.epoch, kind=self.kind, name=self.name, device=self.device)


def own_hub(kind: str, address: Address) -> ChannelHub:
    """Where this node receives on channels of that kind, found by others at the address."""
    node = context()
    usual = node.services.endpoint_for(address.id)
    hub = ChannelHub(node.exit_stack.enter_context(_endpoint(kind, usual)), node.name)
    node.exit_stack.callback(hub.close, f"{node.name} has ended")
    node.services.register(address.id, hub.endpoint)
    return hub


@contextmanager
def _endpoint(kind: str, usual: str) -> Iterator[str]:
    """For senders that ask for `kind`; `usual` is the launcher's choice.

    Between threads that is calls, by which no shared memory travels: "shm" gets a socket in a folder of its own, which
    goes after the body.
    """
    if kind != "shm" or not usual.startswith(inproc.SCHEME):
        yield usual if kind == "auto" else kinds.named(kind).hub_endpoint(usual)
        return
    folder = make_socket_dir()
    try:
        yield f"{unix.SCHEME}{folder}/channels"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
