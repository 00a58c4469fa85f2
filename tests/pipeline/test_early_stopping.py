"""A training ends once its value has not improved for some calls."""

import math
from typing import Any

import pytest
import torch

import lp_pipe.pipeline as pp


def calls_until_stop(values: list[Any], **options: Any) -> int | None:
    stop = pp.EarlyStopping(**options)
    return next((index for index, value in enumerate(values) if stop(value)), None)


def test_it_stops_at_the_patience_th_value_without_improvement() -> None:
    assert calls_until_stop([3.0, 2.0, 2.5, 1.0, 1.5, 1.2, 1.0, 0.5], patience=3) == 6


@pytest.mark.parametrize(
    ("values", "options", "stops_at"),
    [
        ([0.1, 0.2, 0.3, 0.2, 0.3], {"patience": 2, "mode": "max"}, 4),
        ([1.0, 0.95, 0.91, 0.85], {"patience": 2, "min_delta": 0.1}, 2),
        ([math.nan, math.nan], {"patience": 2}, 1),
        ([1.0, math.nan, 0.5, math.nan, math.inf], {"patience": 2}, 4),
        ([math.inf, 5.0, torch.tensor(4.0)], {"patience": 1}, None),
        ([-math.inf, math.nan], {"patience": 1, "mode": "max"}, 1),
    ],
)
def test_values_of_all_kinds(values: list[Any], options: dict[str, Any], stops_at: int | None) -> None:
    assert calls_until_stop(values, **options) == stops_at


def test_its_state_goes_on_in_another_one() -> None:
    first, second = pp.EarlyStopping(patience=2), pp.EarlyStopping(patience=2)
    assert not first(1.0)
    assert not first(2.0)
    second.load_state_dict(first.state_dict())
    assert not second.has_stopped
    assert second(1.5)
    assert (second.best, second.has_stopped) == (1.0, True)


@pytest.mark.parametrize(
    "options", [{"patience": 0}, {"patience": 1, "mode": "best"}, {"patience": 1, "min_delta": -1}]
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"patience|mode|min_delta"):
        pp.EarlyStopping(**options)
