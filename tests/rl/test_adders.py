"""Adders make the same items whatever the rest of the loop does, and nothing crosses an episode."""

from typing import Any

import numpy as np
import pytest

import lp_pipe.rl as rl

GAMMA = 0.5


def played(adder: Any, lengths: list[int], terminated: list[bool]) -> list[Any]:
    """Play episodes whose observation is 10 * episode + step, action 100 + that, and reward 1, 2, 3, …."""
    rows: list[Any] = []

    def take(items: Any) -> None:
        if items is not None:
            count = len(items.reward)
            rows.extend(type(items)(*(rl.tree.row(field, i) for field in items)) for i in range(count))

    for episode, (length, ends) in enumerate(zip(lengths, terminated, strict=True)):
        adder.add_first(np.int64(10 * episode))
        for step in range(1, length + 1):
            now = 10 * episode + step
            is_last = step == length
            take(
                adder.add(
                    np.int64(99 + now),
                    float(step),
                    is_last and ends,
                    is_last and not ends,
                    np.int64(now),
                    {"p": np.float32(step)},
                    np.int64(now - 1),
                )
            )
    return rows


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("terminates", [True, False])
def test_transitions_are_those_of_the_definition(n: int, terminates: bool) -> None:
    lengths = [4, 1, 7]
    found = played(rl.NStepAdder(n, GAMMA), lengths, [terminates] * 3)
    expected = []
    for episode, length in enumerate(lengths):
        for start in range(length):
            count = min(n, length - start)
            reward = sum(GAMMA**i * (start + 1 + i) for i in range(count))
            is_end = start + count == length
            discount = 0.0 if is_end and terminates else GAMMA**count
            first = 10 * episode + start
            expected.append((first, 100 + first, reward, discount, first + count))
    assert sorted((row[0], row[1], float(row[2]), float(row[3]), row[4]) for row in found) == sorted(expected)
    assert all(row.extras["p"] == row.observation % 10 + 1 for row in found)


def test_a_flush_ends_pending_transitions_as_if_truncated() -> None:
    adder = rl.NStepAdder(3, GAMMA)
    adder.add_first(np.int64(0))
    assert adder.add(0, 1.0, False, False, np.int64(1)) is None
    flushed = adder.flush()
    assert flushed.reward.tolist() == [1.0] and flushed.discount.tolist() == [GAMMA]
    assert adder.flush() is None
    with pytest.raises(RuntimeError, match="add_first"):
        adder.add(0, 1.0, False, False, np.int64(1))


@pytest.mark.parametrize(
    ("end", "rows"),
    [
        ("zero_pad", [[0, 1, 2, 3], [2, 3, 4], [10, 11, 12, 13]]),
        ("truncate", [[0, 1, 2, 3], [2, 3, 4], [10, 11, 12, 13]]),
        ("write", [[0, 1, 2, 3], [1, 2, 3, 4], [10, 11, 12, 13]]),
        ("continue", [[0, 1, 2, 3], [2, 3, 4, 10], [4, 10, 11, 12]]),
    ],
)
def test_sequences_begin_every_period_and_end_by_the_rule(end: Any, rows: list[list[int]]) -> None:
    found = played(rl.SequenceAdder(4, 2, end, GAMMA), [5, 4], [False, True])
    assert [row.observation[: int(row.mask.sum())].tolist() for row in found] == rows
    for row in found:
        count = int(row.mask.sum())
        steps = row.observation[:count] % 10 + 1
        assert (row.action[:count] == row.observation[:count] + 100).all() and (row.reward[:count] == steps).all()
        assert row.state == row.observation[0] and (row.mask[count:] == 0).all() and (row.reward[count:] == 0).all()
        assert (row.extras["p"][:count] == steps).all()
        assert len(row.observation) == len(row.reward) + 1 == (count if end == "truncate" else 4) + 1
        assert end == "continue" or row.observation[count] == row.observation[count - 1] + 1  # the final one, too
    if end == "continue":
        assert found[1].discount.tolist() == [GAMMA, GAMMA, 0.0, GAMMA]
    else:
        assert found[-1].discount.tolist() == [GAMMA, GAMMA, GAMMA, 0.0]


def test_rollouts_do_not_overlap() -> None:
    found = played(rl.RolloutAdder(3, GAMMA), [5, 3], [True, False])
    assert [row.mask.tolist() for row in found] == [[1, 1, 1], [1, 1, 0], [1, 1, 1]]
    assert [row.observation[0] for row in found] == [0, 3, 10]


@pytest.mark.parametrize(
    "make", [lambda: rl.NStepAdder(0, 0.9), lambda: rl.NStepAdder(1, 1.1), lambda: rl.SequenceAdder(0, 1)]
)
def test_numbers_out_of_range_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"n=|length="):
        make()
