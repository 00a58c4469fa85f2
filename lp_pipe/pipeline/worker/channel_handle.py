"""The handle by which a stage worker gets at the channels of another one."""

import functools
from collections.abc import Callable
from concurrent.futures import Future

import torch

from lp_pipe.address import Address
from lp_pipe.channels.packing import CPU
from lp_pipe.channels.sender import Sender, open_sender
from lp_pipe.handles import Handle
from lp_pipe.launched import services_for
from lp_pipe.telemetry import waits


class ChannelTarget:
    """The hub of channels at which a neighbour receives tensors."""

    def __init__(self, resolve: "Callable[[], Future[str]]", target: waits.Target) -> None:
        self._resolve = resolve  # called for each channel: the neighbour may have been restarted elsewhere
        self._target = target

    def open(self, channel: str, *, kind: str, name: str, device: torch.device = CPU) -> Sender:
        """Connect to one of the neighbour's channels; wait until it listens. device: where the sent tensors are.

        Raises:
            Unavailable: the neighbour has failed.
            ValueError: this kind of channel does not work between these nodes.
        """
        with waits.waiting(waits.RESOLVE, self._target, f"channel {channel!r}"):
            endpoint = self._resolve().result()
        return open_sender(endpoint, channel, kind=kind, name=name, peer=self._target.peer, device=device)


class ChannelHandle(Handle[ChannelTarget]):
    """A handle for the hub of channels that a stage worker has beside its server."""

    def __init__(self, address: Address, node_name: str, kind: str = "auto") -> None:
        super().__init__()
        self._address = address
        self.node_name = node_name
        self.channel = kind

    @property
    def addresses(self) -> list[Address]:
        return [self._address]

    def dereference(self) -> ChannelTarget:
        services = services_for(self._address.id)
        if services is None:
            raise RuntimeError(f"cannot reach the channels of {self.node_name}: its program is not launched")
        target = waits.Target("", self._address.id, self.node_name)
        return ChannelTarget(functools.partial(services.resolve, self._address.id), target)
