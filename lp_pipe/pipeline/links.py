"""What one worker receives and sends: channels to other workers, a queue between two stages of its own."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from lp_pipe.channels import ChannelHub, Receiver, Sender
from lp_pipe.channels.packing import copied
from lp_pipe.pipeline.channel_handle import ChannelTarget
from lp_pipe.pipeline.schedule.channels import Channels


class Links:
    """The channels that begin or end at `worker`, by the numbers that `Channels` gives them.

    Opening the senders waits until the neighbours' hubs are up.
    """

    def __init__(
        self,
        channels: Channels,
        worker: int,
        hub: ChannelHub,
        targets: Mapping[int, ChannelTarget],
        *,
        kind: str,
        credits: int,
        name: str,
    ) -> None:
        self._channels = channels
        self._local: dict[int, deque[Any]] = {}
        self._receivers: dict[int, Receiver] = {}
        self._senders: dict[int, Sender] = {}
        for channel in self._between_stages():
            sender, receiver = self._channels.sender(channel), self._channels.receiver(channel)
            if sender == receiver == worker:
                self._local[channel] = deque()
            elif receiver == worker:
                self._receivers[channel] = hub.receiver(str(channel), credits=channels.capacity(channel, credits))
        for channel in self._between_stages():
            if self._channels.sender(channel) == worker and channel not in self._local:
                target = targets[self._channels.receiver(channel)]
                self._senders[channel] = target.open(str(channel), kind=kind, name=name)

    def receive(self, channel: int, tag: int) -> Any:
        """The next value of a channel; waits for it.

        Raises:
            ChannelClosed: the sender has ended, or operation `tag` was aborted.
        """
        if channel in self._local:
            return self._local[channel].popleft()
        return self._receivers[channel].receive(tag)

    def send(self, channel: int, tag: int, value: Any) -> None:
        """Put a value on a channel; waits for a credit.

        Raises:
            ChannelClosed: the receiver has ended, or operation `tag` was aborted.
        """
        if channel in self._local:
            # As between workers: the next stage's first layer may write in place to what this stage has saved.
            self._local[channel].append(copied(value))
        else:
            self._senders[channel].send(tag, value)

    def abort(self, tag: int, reason: str) -> None:
        """End operation `tag` (and earlier ones) on every channel, also where somebody waits right now."""
        for receiver in self._receivers.values():
            receiver.abort(tag, reason)
        for sender in self._senders.values():
            sender.abort(tag, reason)

    def discard(self) -> None:
        """Forget what an aborted operation, which all workers have ended, has left behind; its credits go back."""
        for queue in self._local.values():
            queue.clear()
        for receiver in self._receivers.values():
            receiver.look()

    def _between_stages(self) -> list[int]:
        """All channels that join two stages (the numbering leaves two gaps)."""
        stages = len(self._channels.placement)
        return [channel for channel in range(self._channels.count) if channel not in (stages - 1, stages)]
