"""What an action waits for and what it hands on."""

from dataclasses import dataclass

from lp_pipe.pipeline.schedule.ir import Action


@dataclass(frozen=True, slots=True)
class Channels:
    """The edges between neighbouring virtual stages, one each way, numbered by the stage that sends:

        stage 0 -- channel 0 --> stage 1 -- channel 1 --> stage 2      outputs
        stage 0 <-- channel 4 -- stage 1 <-- channel 5 -- stage 2      gradients (3 stages)

    Each carries every micro-batch once, and has one sending and one receiving worker.
    """

    placement: tuple[int, ...]

    @property
    def count(self) -> int:
        return 2 * len(self.placement)

    def receives(self, action: Action) -> int | None:
        """The channel that an action takes its input from, if it needs any from another stage."""
        if action.op == "F":
            return action.stage - 1 if action.stage else None
        if action.op == "W" or action.stage + 1 == len(self.placement):
            return None
        return len(self.placement) + action.stage + 1

    def sends(self, action: Action) -> int | None:
        """The channel that an action puts its result on, if another stage needs it."""
        if action.op == "F":
            return action.stage if action.stage + 1 < len(self.placement) else None
        if action.op == "W" or not action.stage:
            return None
        return len(self.placement) + action.stage

    def sending_stage(self, channel: int) -> int:
        return channel % len(self.placement)

    def receiving_stage(self, channel: int) -> int:
        stages = len(self.placement)
        return channel + 1 if channel < stages else channel - stages - 1

    def sender(self, channel: int) -> int:
        """The worker that sends on a channel."""
        return self.placement[self.sending_stage(channel)]

    def receiver(self, channel: int) -> int:
        """The worker that receives from a channel."""
        return self.placement[self.receiving_stage(channel)]

    def crosses(self, channel: int) -> bool:
        """Whether a channel joins two workers; one within a worker needs no sending."""
        if channel in (len(self.placement) - 1, len(self.placement)):
            return False  # beyond the last stage and before the first there is nobody
        return self.sender(channel) != self.receiver(channel)
