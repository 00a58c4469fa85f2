"""Evolution strategies: seeds and returns travel, and all workers have the same parameters."""

import functools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
from lp_pipe.programs.evolution import Evolution, Settings, Vector, centered_ranks
from lp_pipe.programs.evolution_strategies import (
    Behind,
    CartPole,
    EvolutionResult,
    EvolutionWorker,
    evolution_strategies,
)
from lp_pipe.rpc import codec
from tests.programs.conftest import WITHIN_S, Delivered, Once, kill_this_process, stop_when

SETTINGS = Settings(num_pairs=8, sigma=0.1, learning_rate=0.5, seed=5)


class Bowl:
    """The best parameters are all ones; a trial's noise depends on its seed."""

    def __init__(self, num_parameters: int) -> None:
        self.num_parameters = num_parameters

    def try_out(self, parameters: Vector, seed: tuple[int, ...]) -> float:
        return self.evaluate(parameters) + 0.01 * np.random.default_rng(seed).standard_normal()

    def evaluate(self, parameters: Vector) -> float:
        return -float(np.mean((parameters - 1) ** 2))


def bowl(size: int, delivered: Delivered, num_workers: int = 2, make_problem: Any = Bowl, **options: Any) -> lp.Program:
    make = functools.partial(make_problem, size)
    return evolution_strategies(make, num_workers=num_workers, on_result=delivered, settings=SETTINGS, **options)


def plain_loop(problem: Any, iterations: int) -> Evolution:
    """The same without any program."""
    evolution = Evolution(problem.num_parameters, SETTINGS)
    for _ in range(iterations):
        evolution.update([evolution.try_pair(problem, pair) for pair in range(SETTINGS.num_pairs)])
    return evolution


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)], indirect=True)
def test_it_balances_the_pole(mode: str, delivered: Delivered) -> None:
    program = evolution_strategies(
        functools.partial(CartPole, 8), num_workers=2, on_result=delivered, iterations=60, target=475.0
    )
    result: EvolutionResult = delivered.of(program, mode)
    assert result.is_solved
    assert CartPole(8, num_evaluation_episodes=100).evaluate(result.parameters) == result.score >= 475
    # The same in both modes: what one worker on its own arrives at.
    assert result.fingerprint == _cart_pole_alone(result.iterations)


@functools.cache
def _cart_pole_alone(iterations: int) -> str:
    problem, settings = CartPole(8), Settings()
    evolution = Evolution(problem.num_parameters, settings)
    for _ in range(iterations):
        evolution.update([evolution.try_pair(problem, pair) for pair in range(settings.num_pairs)])
    return evolution.fingerprint()


def test_any_number_of_workers_gives_the_parameters_of_a_plain_loop(mode: str, delivered: Delivered) -> None:
    expected = plain_loop(Bowl(10), iterations=20)
    for num_workers in (1, 3):
        result = delivered.of(bowl(10, delivered, num_workers, iterations=20), mode)
        assert np.array_equal(result.parameters, expected.parameters)
        assert (result.iterations, result.fingerprint) == (20, expected.fingerprint())


@pytest.mark.usefixtures("no_leaks")
def test_workers_without_a_pair_to_try_do_no_harm(delivered: Delivered) -> None:
    result = delivered.of(bowl(4, delivered, num_workers=SETTINGS.num_pairs + 1, iterations=5), "thread")
    assert result.fingerprint == plain_loop(Bowl(4), 5).fingerprint()


def test_it_ends_when_the_target_is_reached(mode: str, delivered: Delivered) -> None:
    result = delivered.of(bowl(4, delivered, iterations=500, target=-0.1, evaluate_every=2), mode)
    assert result.is_solved
    assert result.score >= -0.1
    assert result.iterations < 500


@pytest.mark.usefixtures("no_leaks")
def test_seeds_and_returns_travel_and_no_parameters(delivered: Delivered, monkeypatch: pytest.MonkeyPatch) -> None:
    num_parameters, sizes = 100_000, []
    encode = codec.encode

    def count(value: Any, **options: Any) -> codec.Payload:
        payload = encode(value, **options)
        sizes.append(len(payload.body) + sum(memoryview(buffer).nbytes for buffer in payload.buffers))
        return payload

    monkeypatch.setattr(codec, "encode", count)  # of all calls and replies: the nodes are threads
    delivered.of(bowl(num_parameters, delivered, num_workers=2, iterations=10), "thread")
    assert len(sizes) == 10 * 2 * 2  # iterations, workers, there and back
    assert sum(sizes) / 10 < 4000
    assert 8 * num_parameters > 200 * sum(sizes) / 10


@pytest.mark.usefixtures("no_leaks")
def test_a_worker_killed_in_a_trial_changes_nothing(delivered: Delivered, once: Once) -> None:
    class Deadly(Bowl):
        def try_out(self, parameters: Vector, seed: tuple[int, ...]) -> float:
            if seed == (SETTINGS.seed, 7, 1) and once():
                kill_this_process()
            return super().try_out(parameters, seed)

    result = delivered.of(bowl(5, delivered, make_problem=Deadly, iterations=15), "process")
    assert delivered.restarts("workers") == 1
    assert result.fingerprint == plain_loop(Bowl(5), 15).fingerprint()


@pytest.mark.usefixtures("no_leaks")
def test_a_worker_killed_between_trials_changes_nothing(delivered: Delivered, once: Once) -> None:
    class Deadly(Bowl):
        """The learner, which evaluates, kills a worker that has nothing to do then."""

        def evaluate(self, parameters: Vector) -> float:
            if lp.context().label == "learner" and once():
                os.kill(victim(), signal.SIGKILL)
            return super().evaluate(parameters)

    def victim() -> int:
        (pid,) = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and is_worker(entry)]
        return pid

    def is_worker(pid: str) -> bool:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read()
        is_sibling = int(fields.rpartition(")")[2].split()[1]) == os.getppid()
        return is_sibling and "(lp:workers/1)" in fields

    result = delivered.of(bowl(5, delivered, make_problem=Deadly, iterations=12, evaluate_every=6), "process")
    assert delivered.restarts("workers") == 1
    assert result.fingerprint == plain_loop(Bowl(5), 12).fingerprint()


def test_a_stop_half_way_waits_for_nobody_and_fails_nobody(mode: str, delivered: Delivered, tmp_path: Path) -> None:
    class Blocking(Bowl):
        def try_out(self, parameters: Vector, seed: tuple[int, ...]) -> float:
            if seed == (SETTINGS.seed, 3, 1):
                (tmp_path / "blocked").touch()
                lp.wait_for_stop()
            return super().try_out(parameters, seed)

    stop_when(tmp_path / "blocked", bowl(4, delivered, make_problem=Blocking), mode)


def test_a_worker_with_other_parameters_is_found_out(mode: str, delivered: Delivered) -> None:
    class Torn(Bowl):
        def __init__(self, size: int) -> None:
            super().__init__(size + (lp.context().name == "workers/1"))

    run = lp.launch(bowl(5, delivered, make_problem=Torn), mode)
    with pytest.raises(lp.NodeError, match="workers/1 has other parameters than the learner"):
        run.wait(WITHIN_S)


def test_a_worker_that_lacks_the_past_says_so() -> None:
    returns = [(1.0, 2.0)] * SETTINGS.num_pairs
    kept_up, restarted = (EvolutionWorker(functools.partial(Bowl, 3), SETTINGS) for _ in range(2))
    for iteration in range(3):
        trial = kept_up.try_out(max(0, iteration - 1), [returns][:iteration], range(1))
    with pytest.raises(Behind):
        restarted.try_out(1, [returns], range(1))
    assert restarted.try_out(restarted.iteration(), [returns, returns], range(1)) == trial


def test_equal_returns_share_their_ranks() -> None:
    assert centered_ranks(np.array([[3.0, 1.0], [2.0, 9.0]])).tolist() == pytest.approx(
        np.array([[1 / 6, -0.5], [-1 / 6, 0.5]])
    )
    assert centered_ranks(np.array([500.0, 500.0, 7.0])).tolist() == [0.25, 0.25, -0.5]
    assert centered_ranks(np.full((4, 2), 500.0)).tolist() == [[0.0, 0.0]] * 4


@pytest.mark.parametrize("given", [float("nan"), None, "1.0", np.ones(2)])
def test_a_return_that_is_no_number_is_refused(given: Any) -> None:
    # NaN ranked highest: parameters moved towards whatever broke the trial.
    class Broken(Bowl):
        def try_out(self, parameters: Vector, seed: tuple[int, ...]) -> float:
            return given  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match=r"try_out\(…, seed=\(5, 0, 1\)\) gave .*number"):
        Evolution(2, SETTINGS).try_pair(Broken(2), pair=1)


def test_numbers_below_one_are_refused(delivered: Delivered) -> None:
    with pytest.raises(ValueError, match="num_workers=0"):
        bowl(3, delivered, num_workers=0)
    with pytest.raises(ValueError, match="num_pairs=0"):
        Settings(num_pairs=0)
