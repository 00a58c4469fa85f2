"""Stragglers are found by the seconds of computation that each step reports."""

import itertools
from collections.abc import Iterable, Sequence

import pytest

from lp_pipe.pipeline.conductor.stragglers import SlowWorker, StragglerDetector
from lp_pipe.pipeline.config import Ranks

ONE_EACH = Ranks((1, 1, 1))
USUAL = (0.4, 0.8, 0.4)  # of a step of four micro-batches


def told(detector: StragglerDetector, steps: Iterable[Sequence[float]]) -> list[SlowWorker]:
    return [slow for busy in steps for slow in detector.note(busy, 4)[0]]


def test_a_stage_that_becomes_twice_as_slow_is_told_once_with_its_numbers() -> None:
    detector = StragglerDetector(ONE_EACH, {})
    assert told(detector, [USUAL] * 30) == []
    (slow,) = told(detector, [(0.4, 0.8, 0.9)] * 100)
    assert slow == SlowWorker(2, 0.9 / 4, 0.4 / 4, "by its first steps")
    assert slow.ratio == 2.25
    assert list(detector.slow) == [2]


def test_slow_steps_now_and_then_make_no_straggler() -> None:
    detector = StragglerDetector(ONE_EACH, {})
    hiccups = itertools.cycle([USUAL, (4.0, 0.8, 40.0), USUAL, (0.4, 80.0, 0.4)])
    assert told(detector, itertools.islice(hiccups, 200)) == []


def test_nor_do_the_first_steps_which_are_always_slow() -> None:
    detector = StragglerDetector(ONE_EACH, {0: 0.1, 1: 0.2, 2: 0.1})
    assert told(detector, [(9.0, 9.0, 9.0)] * 3 + [USUAL] * 30) == []


def test_a_plan_says_what_is_expected_from_the_first_steps_on() -> None:
    detector = StragglerDetector(ONE_EACH, {0: 0.1, 1: 0.2, 2: 0.04})
    (slow,) = told(detector, [USUAL] * 25)
    assert slow == SlowWorker(2, 0.1, 0.04, "by the plan")


def test_a_replica_is_compared_with_the_others_by_its_own_micro_batches() -> None:
    """The first of three replicas has two of four micro-batches."""
    detector = StragglerDetector(Ranks((1, 3)), {})
    (slow,) = told(detector, [(0.4, 0.2, 0.3, 0.1)] * 25)
    assert (slow.rank, slow.measured_seconds, slow.by) == (2, 0.3, "by the other replicas of its stage")


def test_what_slows_all_makes_a_straggler_only_of_a_worker_that_it_slows_even_more() -> None:
    detector = StragglerDetector(ONE_EACH, {})
    told(detector, [USUAL] * 30)
    assert told(detector, [(1.2, 2.4, 1.2)] * 30) == []
    (slow,) = told(detector, [(1.2, 6.0, 1.2)] * 30)
    assert (slow.rank, slow.measured_seconds) == (1, 1.5)
    assert slow.ratio == pytest.approx(2.5)  # of what is three times the usual now


def test_a_single_stage_has_nobody_to_be_compared_with_but_a_plan() -> None:
    alone = Ranks((1,))
    assert told(StragglerDetector(alone, {}), [(0.4,)] * 30 + [(4.0,)] * 30) == []
    assert len(told(StragglerDetector(alone, {0: 0.1}), [(0.4,)] * 30 + [(4.0,)] * 30)) == 1


def test_one_that_is_well_again_is_told_of_again_when_it_falls_ill_again() -> None:
    detector = StragglerDetector(ONE_EACH, {})
    told(detector, [USUAL] * 20)
    assert len(told(detector, [(0.4, 1.7, 0.4)] * 30)) == 1
    assert told(detector, [(0.4, 1.4, 0.4)] * 30) == []  # not well yet: below 2 times, but above 1.5
    assert list(detector.slow) == [1]
    well = [rank for _ in range(30) for rank in detector.note(USUAL, 4)[1]]
    assert (well, detector.slow) == ([1], {})
    assert len(told(detector, [(0.4, 1.7, 0.4)] * 30)) == 1


def test_stages_that_take_next_to_no_time_are_noise() -> None:
    detector = StragglerDetector(ONE_EACH, {})
    assert told(detector, [(1e-4, 1e-4, 1e-4)] * 30 + [(1e-3, 1e-4, 3e-3)] * 30) == []
