"""The ends of several channels in one process, which an operation uses together."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from lp_pipe.channels.receiver import Receiver
from lp_pipe.channels.sender import Sender
from lp_pipe.training.device import CPU, to_device, to_host

Key = TypeVar("Key")


class ChannelEnds(Generic[Key]):
    """Receivers and senders, each under a key of the owner's. device: where the owner computes."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self._receivers: dict[Key, Receiver] = {}
        self._senders: dict[Key, Sender] = {}

    def _sending(self, sender: Sender) -> Callable[[int, Any], None]:
        """Return the function that sends a value with a tag; values go through the host's memory if they have to."""
        if sender.carries_gpu or self._device.type == "cpu":
            return sender.send
        return lambda tag, value: sender.send(tag, to_host(value, self._device))

    def _receiving(self, receiver: Receiver) -> Callable[[int], Any]:
        """Return the function that waits for a tag's next value."""
        if self._device.type == "cpu":
            return receiver.receive
        return lambda tag: to_device(receiver.receive(tag), self._device)

    def abort(self, tag: int, reason: str) -> None:
        """End operation `tag` and earlier ones on every channel; threads that wait now fail."""
        for receiver in self._receivers.values():
            receiver.abort(tag, reason)
        for sender in self._senders.values():
            sender.abort(tag, reason)

    def discard(self) -> None:
        """Drop what an aborted operation that all workers have ended has left; its credits go back."""
        for receiver in self._receivers.values():
            receiver.poll()

    def close(self, reason: str) -> None:
        """Close all channels for good; the other ends get the reason."""
        for receiver in self._receivers.values():
            receiver.close(reason)
        for sender in self._senders.values():
            sender.close(reason)
