"""The places where layers are cut into stages."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.cuts import balanced_cuts, check_cuts


def test_cuts_make_the_heaviest_stage_as_light_as_possible() -> None:
    #                     |  4 + 4  |   8   |  2 + 2 + 2  |
    assert balanced_cuts([4, 4, 8, 2, 2, 2], stages=3) == [2, 3]


def test_one_stage_needs_no_cut() -> None:
    assert balanced_cuts([1, 2, 3], stages=1) == []


def test_as_many_stages_as_layers_cuts_everywhere() -> None:
    assert balanced_cuts([5, 0, 1], stages=3) == [1, 2]


def test_layers_without_weight_still_make_stages_that_are_not_empty() -> None:
    assert balanced_cuts([0, 0, 0], stages=2) == [1]


def test_among_equal_cuts_the_earlier_ones_win() -> None:
    assert balanced_cuts([2, 1, 2], stages=2) == [1]


@pytest.mark.parametrize("stages", [0, -1, 4])
def test_it_says_how_many_stages_are_possible(stages: int) -> None:
    with pytest.raises(PipelineError, match=rf"3 layers into {stages} stages: ask for 1 to 3"):
        balanced_cuts([1, 1, 1], stages)


@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=8), data=st.data())
def test_no_other_cuts_are_better(weights: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(weights)))

    def heaviest(cuts: tuple[int, ...]) -> int:
        return max(sum(weights[start:end]) for start, end in pairwise([0, *cuts, len(weights)]))

    found = tuple(balanced_cuts(weights, stages))
    assert found == tuple(check_cuts(found, len(weights)))
    assert heaviest(found) == min(map(heaviest, combinations(range(1, len(weights)), stages - 1)))


def test_given_cuts_are_taken_as_they_are() -> None:
    assert check_cuts((1, 3), layers=4) == [1, 3]
    assert check_cuts([], layers=4) == []


@pytest.mark.parametrize("cuts", [[0], [4], [5], [-1], [2, 1], [2, 2]])
def test_cuts_that_leave_a_stage_empty_are_refused(cuts: list[int]) -> None:
    with pytest.raises(PipelineError, match=r"must increase and lie between 1 and 3"):
        check_cuts(cuts, layers=4)
