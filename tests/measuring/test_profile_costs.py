from pathlib import Path

import pytest

from lp_pipe.errors import ScheduleError
from lp_pipe.measuring.profile_costs import ProfileCosts, is_profile
from lp_pipe.pipeline.partitioning import LayerProfile, Profile
from lp_pipe.pipeline.schedule import Costs

PROFILE = Profile(
    (
        LayerProfile("a", forward_s=1, backward_s=3, activation_bytes=1, parameter_bytes=1, backward_weight_s=2),
        LayerProfile("b", forward_s=1, backward_s=2, activation_bytes=1, parameter_bytes=1, backward_weight_s=0),
        LayerProfile("c", forward_s=2, backward_s=2, activation_bytes=1, parameter_bytes=1),
    )
)


def test_a_measured_model_is_cut_at_its_layers_so_that_the_slowest_stage_is_as_fast_as_can_be() -> None:
    assert ProfileCosts(PROFILE).cut_into(2, 2) == Costs(forward=[1, 3], backward_input=[1, 3], backward_weight=[2, 1])
    assert ProfileCosts(PROFILE).cut_into(3, 3).durations(3)["B"] == [3, 2, 2]


def test_there_are_no_more_stages_than_layers() -> None:
    with pytest.raises(ScheduleError, match="the profile: cannot cut 3 layers into 4 stages, 2 for each of 2 workers"):
        ProfileCosts(PROFILE).cut_into(4, 2)


def test_layers_of_a_graph_are_cut_in_the_order_in_which_they_can_run() -> None:
    backwards = Profile(PROFILE.layers[::-1], edges=(("a", "b"), ("b", "c")))
    assert ProfileCosts(backwards).cut_into(2, 2) == ProfileCosts(PROFILE).cut_into(2, 2)


def test_parts_never_take_less_than_no_time() -> None:
    layers = [LayerProfile(str(i), 0, each, 1, 1, backward_weight_s=each) for i, each in enumerate((0.1, 0.2, 0.3))]
    assert ProfileCosts(Profile(tuple(layers))).cut_into(1, 1).durations(1)["I"] == [0]


def test_a_profile_is_told_from_costs(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    Costs(forward=1, backward_input=1, backward_weight=1).save(tmp_path / "costs.json")
    assert is_profile(tmp_path / "profile.json")
    assert not is_profile(tmp_path / "costs.json")
    assert not is_profile(tmp_path / "none.json")
