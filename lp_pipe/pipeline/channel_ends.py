"""The ends of several channels in one process, which an operation uses together."""

from typing import Generic, TypeVar

from lp_pipe.channels import Receiver, Sender

Key = TypeVar("Key")


class ChannelEnds(Generic[Key]):
    """Keys are what the owner finds an end by."""

    def __init__(self) -> None:
        self._receivers: dict[Key, Receiver] = {}
        self._senders: dict[Key, Sender] = {}

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
