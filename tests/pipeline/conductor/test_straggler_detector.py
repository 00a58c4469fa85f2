"""Stragglers are found by the seconds of computation that each step reports."""

import itertools
from collections.abc import Iterable, Sequence

import pytest

from lp_pipe.pipeline.conductor.stragglers import detector_of, per_microbatch
from lp_pipe.pipeline.config import Ranks
from lp_pipe.training.stragglers import SlowWorker, StragglerDetector

ONE_EACH = Ranks((1, 1, 1))
RANKS = {1: Ranks((1,)), 3: ONE_EACH, 4: Ranks((1, 3))}  # by the number of processes
USUAL = (0.4, 0.8, 0.4)  # of a step of four micro-batches


def noted(detector: StragglerDetector, busy: Sequence[float]) -> tuple[list[SlowWorker], list[int]]:
    return detector.note(per_microbatch(RANKS[len(busy)], busy, 4))


def told(detector: StragglerDetector, steps: Iterable[Sequence[float]]) -> list[SlowWorker]:
    return [slow for busy in steps for slow in noted(detector, busy)[0]]


def test_a_stage_that_becomes_twice_as_slow_is_told_once_with_its_numbers() -> None:
    detector = detector_of(ONE_EACH, ())
    assert told(detector, [USUAL] * 30) == []
    (slow,) = told(detector, [(0.4, 0.8, 0.9)] * 100)
    assert slow == SlowWorker(2, 0.9 / 4, 0.4 / 4, "by its first steps")
    assert slow.ratio == 2.25
    assert list(detector.slow) == [2]


def test_slow_steps_now_and_then_make_no_straggler() -> None:
    detector = detector_of(ONE_EACH, ())
    hiccups = itertools.cycle([USUAL, (4.0, 0.8, 40.0), USUAL, (0.4, 80.0, 0.4)])
    assert told(detector, itertools.islice(hiccups, 200)) == []


def test_nor_do_the_first_steps_which_are_always_slow() -> None:
    detector = detector_of(ONE_EACH, (0.1, 0.2, 0.1))
    assert told(detector, [(9.0, 9.0, 9.0)] * 3 + [USUAL] * 30) == []


def test_a_plan_says_what_is_expected_from_the_first_steps_on() -> None:
    detector = detector_of(ONE_EACH, (0.1, 0.2, 0.04))
    (slow,) = told(detector, [USUAL] * 25)
    assert slow == SlowWorker(2, 0.1, 0.04, "by the plan")


def test_a_replica_is_compared_with_the_others_by_its_own_micro_batches() -> None:
    """The first of three replicas has two of four micro-batches."""
    detector = detector_of(RANKS[4], ())
    (slow,) = told(detector, [(0.4, 0.2, 0.3, 0.1)] * 25)
    assert (slow.rank, slow.measured_seconds, slow.by) == (2, 0.3, "by the other replicas of its stage")


def test_what_slows_all_makes_a_straggler_only_of_a_worker_that_it_slows_even_more() -> None:
    detector = detector_of(ONE_EACH, ())
    told(detector, [USUAL] * 30)
    assert told(detector, [(1.2, 2.4, 1.2)] * 30) == []
    (slow,) = told(detector, [(1.2, 6.0, 1.2)] * 30)
    assert (slow.rank, slow.measured_seconds) == (1, 1.5)
    assert slow.ratio == pytest.approx(2.5)  # of what is three times the usual now


def test_a_single_stage_has_nobody_to_be_compared_with_but_a_plan() -> None:
    assert told(detector_of(RANKS[1], ()), [(0.4,)] * 30 + [(4.0,)] * 30) == []
    assert len(told(detector_of(RANKS[1], (0.1,)), [(0.4,)] * 30 + [(4.0,)] * 30)) == 1


def test_one_that_is_well_again_is_told_of_again_when_it_falls_ill_again() -> None:
    detector = detector_of(ONE_EACH, ())
    told(detector, [USUAL] * 20)
    assert len(told(detector, [(0.4, 1.7, 0.4)] * 30)) == 1
    assert told(detector, [(0.4, 1.4, 0.4)] * 30) == []  # not well yet: below 2 times, but above 1.5
    assert list(detector.slow) == [1]
    well = [rank for _ in range(30) for rank in noted(detector, USUAL)[1]]
    assert (well, detector.slow) == ([1], {})
    assert len(told(detector, [(0.4, 1.7, 0.4)] * 30)) == 1


def test_stages_that_take_next_to_no_time_are_noise() -> None:
    detector = detector_of(ONE_EACH, ())
    assert told(detector, [(1e-4, 1e-4, 1e-4)] * 30 + [(1e-3, 1e-4, 3e-3)] * 30) == []
