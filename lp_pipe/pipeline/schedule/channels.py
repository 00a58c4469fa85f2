"""The channels over which an action gets its inputs and hands on its results."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from lp_pipe.pipeline.schedule.ir import Action, Op

EdgeKind = Literal["value", "value gradient", "tied gradient", "tied weights"]

# The actions that send and receive on each kind of edge; tied weights travel between two steps.
_OPS: dict[EdgeKind, tuple[Op, ...]] = {
    "value": ("F",),
    "value gradient": ("B", "I"),
    "tied gradient": ("B", "W"),
    "tied weights": (),
}


class ScheduleEdge(NamedTuple):
    """A channel between two stages that need not be neighbours.

    names: of the values or parameters that it carries.
    """

    kind: EdgeKind
    sender: int
    receiver: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Channels:
    """The edges between neighbouring virtual stages, one each way, numbered by the stage that sends:

        stage 0 -- channel 0 --> stage 1 -- channel 1 --> stage 2      outputs
        stage 0 <-- channel 4 -- stage 1 <-- channel 5 -- stage 2      gradients (3 stages)

    Then come the `edges` between stages that are not neighbours, or that carry something else.
    Each carries every micro-batch once, and has one sending and one receiving worker.
    """

    placement: tuple[int, ...]
    edges: tuple[ScheduleEdge, ...] = ()

    @property
    def count(self) -> int:
        return 2 * len(self.placement) + len(self.edges)

    def receives(self, action: Action) -> int | None:
        """Return the channel that an action takes its input from, if it needs any from another stage."""
        if action.op == "F":
            return action.stage - 1 if action.stage else None
        if action.op == "W" or action.stage + 1 == len(self.placement):
            return None
        return len(self.placement) + action.stage + 1

    def sends(self, action: Action) -> int | None:
        """Return the channel that an action puts its result on, if another stage needs it."""
        if action.op == "F":
            return action.stage if action.stage + 1 < len(self.placement) else None
        if action.op == "W" or not action.stage:
            return None
        return len(self.placement) + action.stage

    def all_received(self, action: Action) -> list[int]:
        """Return the channels that an action takes something from, in the order in which it does."""
        return self._with_edges(self.receives(action), action, "receiver")

    def all_sent(self, action: Action) -> list[int]:
        """Return the channels that an action puts something on, in the order in which it does."""
        return self._with_edges(self.sends(action), action, "sender")

    def between_stages(self) -> list[int]:
        """Return all channels that join two stages (the numbering leaves two gaps)."""
        stages = len(self.placement)
        return [channel for channel in range(self.count) if channel not in (stages - 1, stages)]

    def numbered_edges(self) -> list[tuple[int, ScheduleEdge]]:
        """Return the edges, each with its channel."""
        return list(enumerate(self.edges, start=2 * len(self.placement)))

    def edges_of(self, action: Action, end: Literal["sender", "receiver"]) -> list[tuple[int, ScheduleEdge]]:
        """Return the edges that an action uses at this end of theirs."""
        if not self.edges:
            return []  # the usual case, which is tested before and after every action
        return [
            (channel, edge)
            for channel, edge in self.numbered_edges()
            if getattr(edge, end) == action.stage and action.op in _OPS[edge.kind]
        ]

    def capacity(self, channel: int, credits: int) -> int:
        """Return how many messages may be on their way at a time.

        An edge that jumps over stages holds what the channels between these hold together. So it fills up no sooner
        than they do, and no worker waits for it that would not have to wait for them.
        """
        edge = self._edge(channel)
        return credits if edge is None else credits * abs(edge.sender - edge.receiver)

    def sending_stage(self, channel: int) -> int:
        """Return the virtual stage that puts something on a channel."""
        edge = self._edge(channel)
        return channel % len(self.placement) if edge is None else edge.sender

    def receiving_stage(self, channel: int) -> int:
        """Return the virtual stage that takes something from a channel."""
        edge = self._edge(channel)
        if edge is not None:
            return edge.receiver
        stages = len(self.placement)
        return channel + 1 if channel < stages else channel - stages - 1

    def sender(self, channel: int) -> int:
        """Return the worker that sends on a channel."""
        return self.placement[self.sending_stage(channel)]

    def receiver(self, channel: int) -> int:
        """Return the worker that receives from a channel."""
        return self.placement[self.receiving_stage(channel)]

    def crosses(self, channel: int) -> bool:
        """Return whether a channel joins two workers; one within a worker needs no sending."""
        if channel in (len(self.placement) - 1, len(self.placement)):
            return False  # there is no stage beyond the last or before the first
        return self.sender(channel) != self.receiver(channel)

    def is_per_step(self, channel: int) -> bool:
        """Return whether a channel carries something between two steps, and not for each micro-batch."""
        edge = self._edge(channel)
        return edge is not None and not _OPS[edge.kind]

    def _with_edges(self, first: int | None, action: Action, end: Literal["sender", "receiver"]) -> list[int]:
        channels = [] if first is None else [first]
        return channels + [channel for channel, _ in self.edges_of(action, end)] if self.edges else channels

    def _edge(self, channel: int) -> ScheduleEdge | None:
        """Return the edge of a channel; None: it joins neighbours."""
        number = channel - 2 * len(self.placement)
        return self.edges[number] if number >= 0 else None
