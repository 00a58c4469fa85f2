"""Channels beside those of outputs and gradients: for stashed values and tied parameters."""

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
    """The extra edges of `channels` that begin or end at a worker's stages."""

    def __init__(self, channels: Channels, links: Links, stages: Mapping[int, Stage]) -> None:
        self._channels = channels
        self._links = links
        self._stages = stages

    def values(self, action: Action, tag: int) -> dict[str, Any]:
        """Return what a forward pops from other stages, as messages."""
        received = {}
        for channel, edge in self._channels.edges_of(action, "receiver"):
            received[edge.names[0]] = Message(*self._links.receiving(channel, action.microbatch)(tag))
        return received

    def send_values(self, action: Action, tag: int, values: Mapping[str, Any]) -> None:
        """Send what a forward has stashed for other stages."""
        for channel, edge in self._channels.edges_of(action, "sender"):
            message = self._stages[action.stage].message_of(values[edge.names[0]])
            self._links.sending(channel, action.microbatch)(tag, message.parts)

    def roots(self, action: Action, tag: int) -> list[tuple[Root, Tensor | None]]:
        """Return where a backward starts beside the stage's outputs, with the gradients received for it."""
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
        """Send the gradients that a backward has left where an edge begins."""
        for channel, edge in self._channels.edges_of(action, "sender"):
            stage = self._stages[action.stage]
            if edge.kind == "value gradient":
                gradients = stage.take_popped_gradients(action.microbatch, *edge.names)
            else:
                gradients = stage.take_gradients(edge.names)
                _refuse_sparse(edge, gradients)
            self._links.sending(channel, action.microbatch)(tag, gradients)

    def share_weights(self, tag: int) -> None:
        """Send the owned tied weights, then receive the borrowed ones: in this order no ring of workers waits."""
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
                f"stages {edge.receiver} and {edge.sender} share parameter {name!r}, whose sparse gradient cannot be "
                "sent. Leave out sparse=True, or cut so that one stage has all layers with the parameter"
            )
