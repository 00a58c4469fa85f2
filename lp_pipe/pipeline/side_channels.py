"""What one worker's stages exchange beside the outputs and gradients of neighbours: tied parameters."""

from collections.abc import Iterator, Mapping
from typing import Literal

from torch import Tensor

from lp_pipe.pipeline.links import Links
from lp_pipe.pipeline.schedule import Action
from lp_pipe.pipeline.schedule.channels import Channels, Edge
from lp_pipe.pipeline.stage import Stage


class SideChannels:
    """The edges of `channels` that begin or end at a worker's stages."""

    def __init__(self, channels: Channels, links: Links, stages: Mapping[int, Stage]) -> None:
        self._channels = channels
        self._links = links
        self._stages = stages

    def roots(self, action: Action, tag: int) -> list[tuple[Tensor, Tensor | None]]:
        """Where a backward starts beside the stage's outputs, and the gradients that have come for it."""
        stage = self._stages[action.stage]
        roots: list[tuple[Tensor, Tensor | None]] = []
        for channel, edge in self._channels.edges_of(action, "receiver"):
            gradients = self._links.receive(channel, tag)
            roots += zip(stage.tied_parameters(edge.names), gradients, strict=True)
        return roots

    def send_gradients(self, action: Action, tag: int) -> None:
        """Hand on what a backward has left where an edge begins."""
        for channel, edge in self._channels.edges_of(action, "sender"):
            self._links.send(channel, tag, self._stages[action.stage].take_gradients(edge.names))

    def share_weights(self, tag: int) -> None:
        """Send the owned weights to the borrowers, then take the borrowed ones: so nobody waits in a ring."""
        for channel, edge in self._tied_weights("sender"):
            weights = self._stages[edge.sender].tied_parameters(edge.names)
            self._links.send(channel, tag, [weight.detach() for weight in weights])
        for channel, edge in self._tied_weights("receiver"):
            borrowed = self._stages[edge.receiver].tied_parameters(edge.names)
            for parameter, weight in zip(borrowed, self._links.receive(channel, tag), strict=True):
                parameter.detach().copy_(weight)

    def _tied_weights(self, end: Literal["sender", "receiver"]) -> Iterator[tuple[int, Edge]]:
        for channel, edge in self._channels.numbered_edges():
            if edge.kind == "tied weights" and getattr(edge, end) in self._stages:
                yield channel, edge
