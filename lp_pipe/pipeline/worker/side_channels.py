"""What one worker's stages exchange beside the outputs and gradients of neighbours: stashed values, tied parameters."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.compute.split_backward import Root
from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.layers.message import Message
from lp_pipe.pipeline.schedule import Action
from lp_pipe.pipeline.schedule.channels import Channels, ScheduleEdge
from lp_pipe.pipeline.worker.links import Links


class SideChannels:
    """The edges of `channels` that begin or end at a worker's stages."""

    def __init__(self, channels: Channels, links: Links, stages: Mapping[int, Stage]) -> None:
        self._channels = channels
        self._links = links
        self._stages = stages

    def values(self, action: Action, tag: int) -> dict[str, Any]:
        """What a forward pops from other stages, as messages."""
        received = {}
        for channel, edge in self._channels.edges_of(action, "receiver"):
            received[edge.names[0]] = Message(*self._links.receiving(channel, action.microbatch)(tag))
        return received

    def send_values(self, action: Action, tag: int, values: Mapping[str, Any]) -> None:
        """Hand on what a forward has stashed for other stages."""
        for channel, edge in self._channels.edges_of(action, "sender"):
            message = self._stages[action.stage].message_of(values[edge.names[0]])
            self._links.sending(channel, action.microbatch)(tag, message.parts)

    def roots(self, action: Action, tag: int) -> list[tuple[Root, Tensor | None]]:
        """Where a backward starts beside the stage's outputs, and the gradients that have come for it."""
        stage = self._stages[action.stage]
        roots: list[tuple[Root, Tensor | None]] = []
        for channel, edge in self._channels.edges_of(action, "receiver"):
            gradients = self._links.receiving(channel, action.microbatch)(tag)
            if edge.kind == "value gradient":
                tensors: Sequence[Root] = stage.stashed(action.microbatch, *edge.names)
            else:
                tensors = stage.tied_parameters(edge.names)
            roots += zip(tensors, gradients, strict=True)
        return roots

    def send_gradients(self, action: Action, tag: int) -> None:
        """Hand on what a backward has left where an edge begins."""
        for channel, edge in self._channels.edges_of(action, "sender"):
            stage = self._stages[action.stage]
            if edge.kind == "value gradient":
                gradients = stage.take_popped_gradients(action.microbatch, *edge.names)
            else:
                gradients = stage.take_gradients(edge.names)
                _refuse_sparse(edge, gradients)
            self._links.sending(channel, action.microbatch)(tag, gradients)

    def share_weights(self, tag: int) -> None:
        """Send the owned weights to the borrowers, then take the borrowed ones: so nobody waits in a ring."""
        for channel, edge in self._tied_weights("sender"):
            weights = self._stages[edge.sender].tied_parameters(edge.names)
            self._links.send_for_step(channel, tag, [weight.detach() for weight in weights])
        for channel, edge in self._tied_weights("receiver"):
            borrowed = self._stages[edge.receiver].tied_parameters(edge.names)
            for parameter, weight in zip(borrowed, self._links.receive_for_step(channel, tag), strict=True):
                parameter.detach().copy_(weight)

    def _tied_weights(self, end: Literal["sender", "receiver"]) -> Iterator[tuple[int, ScheduleEdge]]:
        for channel, edge in self._channels.numbered_edges():
            if edge.kind == "tied weights" and getattr(edge, end) in self._stages:
                yield channel, edge


def _refuse_sparse(edge: ScheduleEdge, gradients: Sequence[Tensor | None]) -> None:
    for name, gradient in zip(edge.names, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise PipelineError(
                f"stages {edge.receiver} and {edge.sender} have parameter {name!r} in common, whose gradient is sparse "
                "and cannot be sent: leave sparse=True out, or cut so that one stage has all of its layers"
            )
