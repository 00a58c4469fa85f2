"""Who one rank is among the processes of its pipeline, and how it comes by channels to the others."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lp_pipe.channels import ChannelHub, Receiver, Sender
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
