"""Adders turn the steps of one environment into the items of a replay table. Need no torch."""

from collections import deque
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from lp_pipe.rl.tree import stacked, tree_map

End = Literal["zero_pad", "truncate", "write", "continue"]


class Transition(NamedTuple):
    """n steps as one: reward is the discounted sum, discount what the value of `next_observation` counts with."""

    observation: Any
    action: Any
    reward: Any
    discount: Any
    next_observation: Any
    extras: Any


class Sequence(NamedTuple):
    """Consecutive steps; observation has one more than the others. mask: 1 for steps, 0 for padding.

    discount: after each step; 0 where the episode terminated, and in end="continue" also at the border of a truncated
    one. state: of the policy at the first step.
    """

    observation: Any
    action: Any
    reward: Any
    discount: Any
    mask: Any
    state: Any
    extras: Any


class Adder(Protocol):
    """What an environment loop tells of each step; it returns the items that are complete, or None."""

    def add_first(self, observation: Any) -> None:
        """Begin an episode."""

    def add(
        self,
        action: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        observation: Any,
        extras: Any = None,
        state: Any = None,
    ) -> Any:
        """Add a step; return the items that are complete as one tree with a leading axis, or None.

        observation: after the step; the last one of its episode where it ends. extras: of the policy, for this action.
        state: of the policy before this action.
        """

    def flush(self) -> Any:
        """Return what is pending, as if the episode were truncated here, or None."""


class NStepAdder:
    """Makes a Transition of every step and the n - 1 after it; fewer at the end of an episode.

    discount: γ. A transition of k steps has the discount γ^k, or 0 if the episode terminated: truncation bootstraps
    from the final observation. Source: Sutton and Barto, "Reinforcement Learning" (2018), section 7.1.
    """

    def __init__(self, n: int, discount: float) -> None:
        """Raises:
        ValueError: n is below 1, or the discount is not in [0, 1].
        """
        if n < 1 or not 0.0 <= discount <= 1.0:
            raise ValueError(f"NStepAdder: n must be at least 1 and discount in [0, 1], got n={n}, discount={discount}")
        self._n = n
        self._discount = discount
        self._steps: deque[tuple[Any, Any, float, Any]] = deque()
        self._observation: Any = None

    def add_first(self, observation: Any) -> None:
        self._steps.clear()
        self._observation = observation

    def add(
        self,
        action: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        observation: Any,
        extras: Any = None,
        state: Any = None,
    ) -> Any:
        _check_has_begun(self._observation)
        self._steps.append((self._observation, action, float(reward), extras))
        self._observation = observation
        if terminated or truncated:
            return self._flushed(terminated)
        return stacked([self._first(False)]) if len(self._steps) == self._n else None

    def flush(self) -> Any:
        return self._flushed(False)

    def _flushed(self, terminated: bool) -> Any:
        items = []
        while self._steps:
            items.append(self._first(terminated))
        self._observation = None
        return stacked(items) if items else None

    def _first(self, terminated: bool) -> Transition:
        """Return the transition that begins with the oldest pending step, and drop that step."""
        total = 0.0
        for _, _, reward, _ in reversed(self._steps):
            total = reward + self._discount * total
        discount = 0.0 if terminated else self._discount ** len(self._steps)
        observation, action, _, extras = self._steps.popleft()
        numbers = np.float32(total), np.float32(discount)
        return Transition(observation, action, *numbers, self._observation, extras)


class SequenceAdder:
    """Makes a Sequence of `length` steps every `period` steps.

    end: where steps at the end of an episode are in no sequence yet, the sequence that the end cuts off is
        "zero_pad": filled up with zeros, whose mask is 0.
        "truncate": left shorter.
        "write": moved back, so that it ends with the episode; a shorter episode is filled up with zeros.
        "continue": filled up with the next episode's steps. Its border is marked by a discount of 0.
    discount: γ, the discount after a step that does not end its episode.
    """

    def __init__(self, length: int, period: int, end: End = "zero_pad", discount: float = 1.0) -> None:
        """Raises:
        ValueError: a number is below 1, or `end` is none of the four.
        """
        if min(length, period) < 1 or end not in ("zero_pad", "truncate", "write", "continue"):
            raise ValueError(
                "SequenceAdder: length and period must be at least 1 and end one of zero_pad, truncate, write, "
                f"continue; got length={length}, period={period}, end={end!r}"
            )
        self._length = length
        self._period = period
        self._end = end
        self._discount = discount
        self._steps: list[tuple[Any, ...]] = []  # the newest `length` ones at most, or those since the last border
        self._observation: Any = None
        self._since = 0  # steps since the present sequence began; negative before it begins
        self._fresh = 0  # steps that are in no sequence yet

    def add_first(self, observation: Any) -> None:
        if self._end != "continue":
            self._steps, self._since, self._fresh = [], 0, 0
        self._observation = observation

    def add(
        self,
        action: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        observation: Any,
        extras: Any = None,
        state: Any = None,
    ) -> Any:
        _check_has_begun(self._observation)
        is_last = terminated or truncated
        is_border = terminated or (truncated and self._end == "continue")
        numbers = np.float32(reward), np.float32(0.0 if is_border else self._discount), np.float32(1.0)
        self._steps.append((self._observation, action, *numbers, state, extras))
        self._steps = self._steps[-self._length :]
        self._since += 1
        self._fresh += 1
        self._observation = observation
        found = None
        if self._since == self._length:
            found = self._sequence(self._steps)
            self._since -= self._period
            self._fresh = 0
        elif is_last and self._end != "continue":
            found = self._cut_off()
        return None if found is None else stacked([found])

    def flush(self) -> Any:
        found = self._cut_off()
        return None if found is None else stacked([found])

    def _cut_off(self) -> Sequence | None:
        """Return the sequence that the end cuts off, if there is one, and begin anew."""
        steps, since, fresh = self._steps, self._since, self._fresh
        self._steps, self._since, self._fresh = [], 0, 0
        if since <= 0 or not fresh:
            return None
        return self._sequence(steps if self._end == "write" else steps[-since:])

    def _sequence(self, steps: list[tuple[Any, ...]]) -> Sequence:
        observations, actions, rewards, discounts, mask, states, extras = zip(*steps, strict=True)
        sequence = Sequence(
            observation=stacked([*observations, self._observation]),
            action=stacked(actions),
            reward=stacked(rewards),
            discount=stacked(discounts),
            mask=stacked(mask),
            state=states[0],
            extras=stacked(extras),
        )
        missing = 0 if self._end == "truncate" else self._length - len(steps)
        if not missing:
            return sequence
        padded = {name: _padded(getattr(sequence, name), missing) for name in sequence._fields if name != "state"}
        return sequence._replace(**padded)


class RolloutAdder(SequenceAdder):
    """Makes a Sequence of every `length` steps, without overlap; an episode's end fills it up with zeros."""

    def __init__(self, length: int, discount: float = 1.0) -> None:
        """Raises:
        ValueError: the length is below 1.
        """
        super().__init__(length, length, "zero_pad", discount)


def _padded(tree: Any, missing: int) -> Any:
    return tree_map(lambda leaf: np.concatenate([leaf, np.zeros((missing, *leaf.shape[1:]), leaf.dtype)]), tree)


def _check_has_begun(observation: Any) -> None:
    if observation is None:
        raise RuntimeError("add before add_first: an episode begins with its first observation")
