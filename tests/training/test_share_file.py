"""Written values can be read back: Python's own, tensors, and numpy's numbers; all others are refused at once."""

import functools
import io
import threading
from collections import Counter, OrderedDict, deque
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lp_pipe.errors import PipelineError
from lp_pipe.training.share_file import dumped, loaded

KEY = ("lr_scheduler",)


def again(value: Any) -> Any:
    return loaded(io.BytesIO(dumped(KEY, value)))


@pytest.mark.parametrize(
    "value",
    [
        {"last_epoch": 3, "milestones": Counter([2, 4]), "base_lrs": [0.1], "betas": (0.9, 0.99), "name": None},
        OrderedDict(seen={1, 2}, key=b"x", wide=2**70, z=1j, size=torch.Size([2]), dtype=torch.float16),
        np.float64(0.1),
        [np.float32(0.1), np.int64(3), np.bool_(True), np.str_("cos")],
        {np.int32(1): "a"},
    ],
    ids=["a scheduler's", "others", "numpy", "numpy's kinds", "numpy's keys"],
)
def test_values_come_back_as_they_were(value: Any) -> None:
    got = again(value)
    assert got == value and type(got) is type(value)
    if isinstance(value, list):
        assert [type(one) for one in got] == [type(one) for one in value]


def test_so_do_arrays_and_tensors() -> None:
    value = {"table": np.linspace(0, 1, 5, dtype=np.float32), "rate": nn.Parameter(torch.ones(2))}
    got = again(value)
    assert np.array_equal(got["table"], value["table"]) and got["table"].dtype == np.float32
    assert torch.equal(got["rate"], torch.ones(2))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"inner": [{"history": deque([1.0])}]}, r"lr_scheduler\['inner'\]\[0\]\['history'\] is a deque, which cannot"),
        ({"f": lambda step: step}, r"lr_scheduler\['f'\] is a function, which cannot be read back from a checkpoint"),
        ({1: functools.partial(int)}, r"lr_scheduler\[1\] is a partial"),
        ({frozenset({1}): 1}, r"is a frozenset"),
        (np.array([None]), "lr_scheduler is a ndarray"),
    ],
    ids=["deque", "function", "partial", "key", "objects"],
)
def test_what_would_not_is_refused_with_its_place(value: Any, message: str) -> None:
    """Regression: it was written, and only the load after a crash failed."""
    with pytest.raises(PipelineError, match=message):
        dumped(KEY, value)


def test_what_a_user_has_allowed_stays_allowed() -> None:
    with torch.serialization.safe_globals([np.dtype, Fraction]):
        allowed = set(torch.serialization.get_safe_globals())
        assert again([np.float64(1.0), Fraction(1, 3)]) == [1.0, Fraction(1, 3)]
        assert set(torch.serialization.get_safe_globals()) == allowed


def test_stages_that_are_threads_read_at_the_same_time() -> None:
    """Regression: a reader that was done took back what it had allowed for another one's reading."""
    entry, failures = dumped(KEY, np.float64(0.5)), []

    def read() -> None:
        try:
            for _ in range(100):
                loaded(io.BytesIO(entry))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_value_that_holds_itself_is_no_trouble() -> None:
    value: dict[str, Any] = {"n": 1}
    value["self"] = value
    assert again(value)["self"]["n"] == 1
