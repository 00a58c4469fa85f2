"""The links of one rank's stages: channels to other workers, and boxes between two stages of its own."""

from collections.abc import Callable
from typing import Any

from lp_pipe.channels.packing import copied
from lp_pipe.pipeline.schedule.channels import Channels
from lp_pipe.pipeline.worker.channel_ends import ChannelEnds
from lp_pipe.pipeline.worker.neighbours import Neighbours


class Links(ChannelEnds[tuple[int, int]]):
    """The channels that begin or end at one rank, by their numbers in `Channels`.

    Between workers with replicas a channel is one connection for each pair of ranks in `Ranks.routes`; the micro-batch
    decides which. Opening the senders waits until the neighbours' hubs are up.
    """

    def __init__(self, channels: Channels, neighbours: Neighbours, credits: int) -> None:
        super().__init__(neighbours.device)  # receivers by channel and sending rank, senders by channel and receiving
        self._channels = channels
        ranks, rank = neighbours.ranks, neighbours.rank
        worker, self._replica = neighbours.place
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
                    label = _label(channel, sender, receiver, routes[channel])
                    capacity = channels.capacity(channel, credits)
                    self._receivers[channel, sender] = neighbours.receiver(label, capacity)
        for channel in own:
            for sender, receiver in routes[channel]:
                if sender == rank and channel not in self._local:
                    label = _label(channel, sender, receiver, routes[channel])
                    self._senders[channel, receiver] = neighbours.sender(receiver, label)

    def receiving(self, channel: int, microbatch: int) -> Callable[[int], Any]:
        """Return the function that waits for a micro-batch's value in the operation with a tag.

        The function raises:
            ChannelClosed: the sender has ended, or the operation was aborted.
        """
        if channel in self._local:
            box = self._local[channel]
            return lambda tag: box.pop(microbatch)
        senders, _ = self._peers[channel]
        return self._receiving(self._receivers[channel, senders[microbatch % len(senders)]])

    def sending(self, channel: int, microbatch: int) -> Callable[[int, Any], None]:
        """Return the function that sends a micro-batch's value in the operation with a tag, once there is a credit.

        The function raises:
            ChannelClosed: the receiver has ended, or the operation was aborted.
        """
        if channel in self._local:
            return lambda tag, value: self._keep(channel, microbatch, value)
        _, receivers = self._peers[channel]
        return self._sending(self._senders[channel, receivers[microbatch % len(receivers)]])

    def receive_for_step(self, channel: int, tag: int) -> Any:
        """Wait for what a channel carries once a step."""
        return self.receiving(channel, self._replica)(tag)

    def send_for_step(self, channel: int, tag: int, value: Any) -> None:
        """Send what a channel carries once a step on all its routes that begin here."""
        if channel in self._local:
            self._keep(channel, self._replica, value)
        for (number, _), sender in self._senders.items():
            if number == channel:
                self._sending(sender)(tag, value)

    def discard(self) -> None:
        """Drop what an aborted operation has left in the channels, and in the boxes."""
        for box in self._local.values():
            box.clear()
        super().discard()

    def _keep(self, channel: int, number: int, value: Any) -> None:
        # A copy, as between workers: the next stage's first layer may write in place to what this stage has saved.
        self._local[channel][number] = copied(value)

    def _ends(self, channel: int) -> tuple[int, int]:
        return self._channels.sender(channel), self._channels.receiver(channel)


def _label(channel: int, sender: int, receiver: int, routes: list[tuple[int, int]]) -> str:
    """Return the connection's name; the ranks are in it only if the channel has several connections."""
    return str(channel) if len(routes) == 1 else f"{channel} from rank {sender} to {receiver}"
