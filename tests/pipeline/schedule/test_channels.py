from lp_pipe.pipeline.schedule import Action
from lp_pipe.pipeline.schedule.channels import Channels


def test_neighbouring_stages_are_joined_both_ways() -> None:
    channels = Channels(placement=(0, 1, 2))
    assert channels.sends(Action("F", 0, 0)) == channels.receives(Action("F", 1, 0)) == 0
    assert channels.sends(Action("B", 2, 0)) == channels.receives(Action("B", 1, 0)) == 5
    assert (channels.sender(5), channels.receiver(5)) == (2, 1)


def test_the_input_gradient_travels_and_the_weights_stay() -> None:
    channels = Channels(placement=(0, 1))
    assert channels.sends(Action("I", 1, 0)) == channels.sends(Action("B", 1, 0))
    assert channels.sends(Action("I", 1, 0)) == channels.receives(Action("I", 0, 0))
    assert channels.sends(Action("W", 1, 0)) is channels.receives(Action("W", 0, 0)) is None


def test_the_ends_of_the_pipeline_need_nobody() -> None:
    channels = Channels(placement=(0, 1))
    assert channels.receives(Action("F", 0, 0)) is channels.sends(Action("F", 1, 0)) is None
    assert channels.receives(Action("B", 1, 0)) is channels.sends(Action("B", 0, 0)) is None


def test_only_channels_between_workers_cross() -> None:
    """A V of four stages on two workers: stages 1 and 2 are on one worker."""
    channels = Channels(placement=(0, 1, 1, 0))
    assert [channel for channel in range(channels.count) if channels.crosses(channel)] == [0, 2, 5, 7]
