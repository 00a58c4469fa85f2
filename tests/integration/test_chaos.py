"""Programs that are killed at fixed moments and resumed to the same bits; `make chaos` does any number of rounds.

Fixed are the moments (in seconds), the victims' places in the list of processes, and the signals. What a process does
at that moment is the machine's business, and the end must be the same whatever it is.
"""

import functools
import random
from pathlib import Path

import pytest

import lp_pipe as lp
from benchmarks.chaos import PROGRAMS
from benchmarks.strikes import Chance, Program, Round, disturbed, undisturbed
from benchmarks.tally import Options, tally

OPTIONS = {
    mode: Options(mode=mode, num_workers=2, num_servers=2, steps=100, evaluations=20, pause_ms=10.0)
    for mode in ("sync", "async")
}  # a second of training: a strike 1.2 s after the launch finds it under way


def sha256_of_tally(mode: str, folder: Path) -> str:
    """Return the tally of an undisturbed run, as threads of this process."""
    program = tally(OPTIONS[mode], lambda result: (folder / "sha256").write_text(result.sha256))
    lp.launch(program, "thread", run_dir=folder / "undisturbed").wait(60)
    return (folder / "sha256").read_text()


def tally_round(mode: str, seed: int, folder: Path) -> Round:
    options = OPTIONS[mode]
    flags = [f"--{name}={getattr(options, name)}" for name in options.__dataclass_fields__]
    program = Program("benchmarks/tally.py", tuple(flags))
    chance = Chance(random.Random(seed), ["process"], usual_s=1.2, longest_stop_s=1.0, most_strikes=2)
    return disturbed(program, folder / "round", chance)


@pytest.mark.parametrize(
    ("mode", "seed"),
    [
        ("async", 30),
        *(
            pytest.param(mode, seed, marks=pytest.mark.slow)
            for mode, seed in [("sync", 7), ("async", 9), ("sync", 34), ("sync", 5)]
        ),
    ],
)
def test_a_parameter_server_that_is_struck_anywhere_ends_with_the_same_parameters(
    mode: str, seed: int, tmp_path: Path
) -> None:
    done = tally_round(mode, seed, tmp_path)
    assert done.strikes
    assert done.sha256 == sha256_of_tally(mode, tmp_path)
    assert done.left == 0


# As `make chaos` has them, and shorter: the last of two equal flags counts.
SHORTER = {
    **{"char_gpt": "--steps=20", "char_gpt_restarted": "--steps=20"},
    **{"sync": "--steps=500", "stateful": "--steps=30", "async": "--steps=250"},
}
SHORT = {name: Program(one.target, (*one.flags, SHORTER[name])) for name, one in PROGRAMS.items()}


@functools.cache
def undisturbed_once(name: str, folder: Path) -> Round:
    return undisturbed(SHORT[name], folder / name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("index", range(20))
def test_twenty_rounds_end_with_the_same_bits_and_no_process(
    index: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = list(SHORT)[index % len(SHORT)]
    reference = undisturbed_once(name, tmp_path_factory.getbasetemp())
    chance = Chance(random.Random(f"suite/{index}"), ["process", "thread"], reference.seconds, longest_stop_s=9.0)
    done = disturbed(SHORT[name], tmp_path / "round", chance)
    assert done.sha256 == reference.sha256
    assert done.left == 0
