"""Random programs, with deaths at random places, have the bits of the plain loop, end, and leave nothing behind."""

import random
from pathlib import Path

import pytest

import lp_pipe as lp
from lp_pipe.testing import assert_no_leaks
from tests.data_parallel.random_programs import RandomProgram

WITHIN_S = 60
FEW, THREADS, PROCESSES = 5, 190, 10


def check(given: RandomProgram, folder: Path) -> None:
    with assert_no_leaks():
        lp.launch(given.program(folder), mode=given.mode, run_dir=folder / "run", grace=2.0).wait(WITHIN_S)
    assert given.differences(folder) == [], given


@pytest.mark.parametrize("seed", range(FEW))
def test_random_programs_have_the_bits_of_the_plain_loop(seed: int, tmp_path: Path) -> None:
    check(RandomProgram.of(seed), tmp_path)


def test_a_new_random_program_has_the_bits_of_the_plain_loop(tmp_path: Path) -> None:
    given = RandomProgram.of(random.SystemRandom().randrange(10**9))
    print(given)  # shown if the test fails
    check(given, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 100 + THREADS))
def test_many_random_programs_have_the_bits_of_the_plain_loop(seed: int, tmp_path: Path) -> None:
    check(RandomProgram.of(seed), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300, 300 + PROCESSES))
def test_random_programs_in_processes_have_the_bits_of_the_plain_loop(seed: int, tmp_path: Path) -> None:
    check(RandomProgram.of(seed, "process"), tmp_path)
