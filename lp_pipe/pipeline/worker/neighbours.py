"""The channels of one rank to the other processes of its pipeline."""

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
from lp_pipe.connections.socket_dir import make_socket_dir
from lp_pipe.context import context
from lp_pipe.pipeline.config import Ranks
from lp_pipe.pipeline.worker.channel_handle import ChannelTarget
from lp_pipe.training.device import CPU


@dataclass(frozen=True)
class Neighbours:
    """The neighbours of `rank`, which is the node `name` and computes on `device`.

    hub: where the rank receives. targets: by rank, the hubs to which it sends. kind: of the channels.
    epoch: part of the channels' names, which makes them differ from those before a neighbour was restarted.
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
        """Return worker and replica of this rank."""
        return self.ranks.places[self.rank]

    def receiver(self, label: str, credits: int) -> Receiver:
        """Return the receiving end of the channel that the sender calls `label`."""
        return self.hub.receiver(label + self.epoch, credits=credits, device=self.device)

    def sender(self, rank: int, label: str) -> Sender:
        """Return the sending end of a channel to another rank, once that rank listens.

        Raises:
            Unavailable: the other rank has failed.
            ValueError: this kind of channel does not work between these nodes.
        """
        return self.targets[rank].open(label + self.epoch, kind=self.kind, name=self.name, device=self.device)


def own_hub(kind: str, address: Address) -> ChannelHub:
    """Open the hub at which this node receives on channels of that kind, until the node ends; register its address."""
    node = context()
    usual = node.services.endpoint_for(address.id)
    hub = ChannelHub(node.exit_stack.enter_context(_endpoint(kind, usual)), node.name)
    node.exit_stack.callback(hub.close, f"{node.name} has ended")
    node.services.register(address.id, hub.endpoint)
    return hub


@contextmanager
def _endpoint(kind: str, usual: str) -> Iterator[str]:
    """Yield the endpoint of a hub for channels of that kind. usual: the endpoint that the launcher chose.

    Between threads the usual endpoint is one of calls, which carry no shared memory. So "shm" gets a socket, in a
    folder that is removed after the body.
    """
    if kind != "shm" or not usual.startswith(inproc.SCHEME):
        yield usual if kind == "auto" else kinds.named(kind).hub_endpoint(usual)
        return
    folder = make_socket_dir()
    try:
        yield f"{unix.SCHEME}{folder}/channels"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
