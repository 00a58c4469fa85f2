from lp_pipe.pipeline.schedule import Action
from lp_pipe.pipeline.schedule.channels import Channels, ScheduleEdge


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


SKIP = ScheduleEdge("value", 0, 3, ("a",))
SKIP_BACK = ScheduleEdge("value gradient", 3, 0, ("a",))
TIED = ScheduleEdge("tied gradient", 3, 0, ("0.weight",))


def test_an_edge_joins_stages_that_are_not_neighbours() -> None:
    channels = Channels((0, 1, 2, 3), (SKIP, SKIP_BACK, TIED))
    assert channels.all_sent(Action("F", 0, 0)) == [0, 8]
    assert channels.all_received(Action("F", 3, 0)) == [2, 8]
    assert channels.all_sent(Action("B", 3, 0)) == [7, 9, 10]
    assert channels.all_received(Action("B", 0, 0)) == [5, 9, 10]
    assert channels.all_received(Action("F", 1, 0)) == [0]


def test_in_a_split_backward_values_belong_to_the_first_part_and_weights_to_the_second() -> None:
    channels = Channels((0, 1, 2, 3), (SKIP, SKIP_BACK, TIED))
    assert channels.all_sent(Action("I", 3, 0)) == [7, 9]
    assert channels.all_sent(Action("W", 3, 0)) == channels.all_received(Action("W", 0, 0)) == [10]


def test_an_edge_holds_as_much_as_the_channels_that_it_jumps_over() -> None:
    channels = Channels((0, 1, 2, 3), (SKIP, SKIP_BACK))
    assert [channels.capacity(channel, credits=2) for channel in (0, 8, 9)] == [2, 6, 6]
