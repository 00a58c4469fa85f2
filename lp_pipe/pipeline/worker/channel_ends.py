"""The ends of several channels in one process, which an operation uses together."""

from typing import Any, Generic, TypeVar

import torch

from lp_pipe.channels import Receiver, Sender
from lp_pipe.pipeline.compute.device import CPU, to_device, to_host

Key = TypeVar("Key")


class ChannelEnds(Generic[Key]):
    """Keys are what the owner finds an end by. device: where the owner computes."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self._receivers: dict[Key, Receiver] = {}
        self._senders: dict[Key, Sender] = {}

    def _send(self, sender: Sender, tag: int, value: Any) -> None:
        """By the host's memory, unless the channel has another way."""
        sender.send(tag, value if sender.carries_gpu else to_host(value, self._device))

    def _receive(self, receiver: Receiver, tag: int) -> Any:
        return to_device(receiver.receive(tag), self._device)

    def abort(self, tag: int, reason: str) -> None:
        """End operation `tag` (and earlier ones) on every channel, also where somebody waits right now."""
        for receiver in self._receivers.values():
            receiver.abort(tag, reason)
        for sender in self._senders.values():
            sender.abort(tag, reason)

    def discard(self) -> None:
        """Forget what an aborted operation, which all workers have ended, has left behind; its credits go back."""
        for receiver in self._receivers.values():
            receiver.look()

    def close(self, reason: str) -> None:
        """For good; the other ends get the reason."""
        for receiver in self._receivers.values():
            receiver.close(reason)
        for sender in self._senders.values():
            sender.close(reason)
