"""What one rank receives and sends for its stages: channels to other workers, a box between two stages of its own."""

from collections.abc import Mapping
from typing import Any

import torch

from lp_pipe.channels import ChannelHub
from lp_pipe.pipeline.compute.device import CPU, copied_on
from lp_pipe.pipeline.ranks import Ranks
from lp_pipe.pipeline.schedule.channels import Channels
from lp_pipe.pipeline.worker.channel_ends import ChannelEnds
from lp_pipe.pipeline.worker.channel_handle import ChannelTarget


class Links(ChannelEnds[tuple[int, int]]):
    """The channels that begin or end at `rank`, by the numbers that `Channels` gives them.

    Between workers with replicas a channel is one connection for each pair of ranks in `Ranks.routes`; a micro-batch
    decides which. Opening the senders waits until the neighbours' hubs are up. epoch: what tells the connections' names
    from those before a neighbour was restarted.
    """

    def __init__(
        self,
        channels: Channels,
        ranks: Ranks,
        rank: int,
        hub: ChannelHub,
        targets: Mapping[int, ChannelTarget],
        *,
        kind: str,
        credits: int,
        name: str,
        device: torch.device = CPU,
        epoch: str = "",
    ) -> None:
        super().__init__(device)  # receivers by channel and sending rank, senders by channel and receiving rank
        self._channels = channels
        worker, self._replica = ranks.places[rank]
        self._local: dict[int, dict[int, Any]] = {}
        own = [channel for channel in channels.between_stages() if worker in self._ends(channel)]
        self._peers = {channel: [ranks.of(end) for end in self._ends(channel)] for channel in own}  # sending, receiving
        routes = {channel: ranks.routes(channels, channel) for channel in own}
        for channel in own:
            if self._ends(channel) == (worker, worker):
                self._local[channel] = {}
                continue
            for sender, receiver in routes[channel]:
                if receiver == rank:
                    label = _label(channel, sender, receiver, routes[channel]) + epoch
                    capacity = channels.capacity(channel, credits)
                    self._receivers[channel, sender] = hub.receiver(label, credits=capacity, device=device)
        for channel in own:
            for sender, receiver in routes[channel]:
                if sender == rank and channel not in self._local:
                    label = _label(channel, sender, receiver, routes[channel]) + epoch
                    target = targets[receiver]
                    self._senders[channel, receiver] = target.open(label, kind=kind, name=name, device=device)

    def receive(self, channel: int, tag: int, microbatch: int) -> Any:
        """A micro-batch's value; waits for it.

        Raises:
            ChannelClosed: the sender has ended, or operation `tag` was aborted.
        """
        if channel in self._local:
            return self._local[channel].pop(microbatch)
        senders, _ = self._peers[channel]
        receiver = self._receivers[channel, senders[microbatch % len(senders)]]
        return self._receive(receiver, tag)

    def send(self, channel: int, tag: int, microbatch: int, value: Any) -> None:
        """Put a micro-batch's value on a channel; waits for a credit.

        Raises:
            ChannelClosed: the receiver has ended, or operation `tag` was aborted.
        """
        if channel in self._local:
            # As between workers: the next stage's first layer may write in place to what this stage has saved.
            self._local[channel][microbatch] = copied_on(value, self._device)
        else:
            _, receivers = self._peers[channel]
            self._send(self._senders[channel, receivers[microbatch % len(receivers)]], tag, value)

    def receive_for_step(self, channel: int, tag: int) -> Any:
        """What a channel carries once a step."""
        return self.receive(channel, tag, self._replica)

    def send_for_step(self, channel: int, tag: int, value: Any) -> None:
        """Put something that a channel carries once a step on all its routes that begin here."""
        if channel in self._local:
            self._local[channel][self._replica] = copied_on(value, self._device)
        for (number, _), sender in self._senders.items():
            if number == channel:
                self._send(sender, tag, value)

    def discard(self) -> None:
        """As on all channels, and in the boxes."""
        for box in self._local.values():
            box.clear()
        super().discard()

    def _ends(self, channel: int) -> tuple[int, int]:
        return self._channels.sender(channel), self._channels.receiver(channel)


def _label(channel: int, sender: int, receiver: int, routes: list[tuple[int, int]]) -> str:
    """The connection's name; the ranks are in it only where there are several."""
    return str(channel) if len(routes) == 1 else f"{channel} from rank {sender} to {receiver}"
