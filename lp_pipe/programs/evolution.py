"""The arithmetic of evolution strategies, which gives the same bits on the learner and on every worker."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
# For each antithetic pair, in order: the returns of the parameters plus and minus its perturbation.
Returns = Sequence[tuple[float, float]]


class EvolutionProblem(Protocol):
    """A function of parameters that is to be maximized."""

    @property
    def num_parameters(self) -> int: ...

    def try_out(self, parameters: Vector, seed: tuple[int, ...]) -> float:
        """Return the result of one trial; a function of its arguments only."""

    def evaluate(self, parameters: Vector) -> float:
        """Return the score to compare with the target; a function of the parameters only."""


@dataclass(frozen=True)
class Settings:
    """Hyperparameters. num_pairs: antithetic pairs per iteration; sigma: the perturbations' standard deviation."""

    num_pairs: int = 16
    sigma: float = 0.1
    learning_rate: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_pairs < 1 or self.sigma <= 0:
            raise ValueError(
                f"evolution strategies: num_pairs and sigma must be positive, got num_pairs={self.num_pairs}, "
                f"sigma={self.sigma}"
            )


class Evolution:
    """Parameters that are updated by the returns of their perturbations; initially zeros."""

    def __init__(self, num_parameters: int, settings: Settings) -> None:
        self.parameters: Vector = np.zeros(num_parameters)
        self.iteration = 0
        self._settings = settings

    def try_pair(self, problem: EvolutionProblem, pair: int) -> tuple[float, float]:
        """Return the results of the parameters plus and minus the pair's perturbation, with the same seed."""
        step = self._settings.sigma * self._noise(pair)
        seed = (self._settings.seed, self.iteration, pair)
        return _return_of(problem, self.parameters + step, seed), _return_of(problem, self.parameters - step, seed)

    def update(self, returns: Returns) -> None:
        """Move along the perturbations, each by the ranks of its pair's returns (Salimans et al., algorithm 1)."""
        shaped = centered_ranks(np.asarray(returns))
        gradient = np.zeros_like(self.parameters)
        for pair, (plus, minus) in enumerate(shaped):  # one by one, so that no library changes the order of the sum
            gradient += (plus - minus) * self._noise(pair)
        gradient /= 2 * len(shaped) * self._settings.sigma
        self.parameters = self.parameters + self._settings.learning_rate * gradient
        self.iteration += 1

    def fingerprint(self) -> str:
        """Return the sha256 of the parameters."""
        return hashlib.sha256(self.parameters.tobytes()).hexdigest()

    def _noise(self, pair: int) -> Vector:
        rng = np.random.default_rng((self._settings.seed, self.iteration, pair))
        return rng.standard_normal(len(self.parameters))


def _return_of(problem: EvolutionProblem, parameters: Vector, seed: tuple[int, ...]) -> float:
    """Run a trial and check its result.

    Raises:
        ValueError: the result is no number or NaN, which would rank highest and pull the parameters towards failures.
    """
    given = problem.try_out(parameters, seed)
    is_number = np.ndim(given) == 0 and given is not None and not isinstance(given, str | bytes)
    if not is_number or math.isnan(given):
        raise ValueError(f"evolution strategies: try_out(…, seed={seed}) gave {given!r}, but must return a number")
    return float(given)


def centered_ranks(values: Vector) -> Vector:
    """Return ranks from -0.5 for the lowest to 0.5 for the highest value; equal values get the mean of their ranks.

    If equal returns were ranked by position, a population of perfect policies would still be changed.
    """
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean_ranks = ends - (counts + 1) / 2
    ranks: Vector = mean_ranks[inverse].reshape(values.shape) / max(1, values.size - 1) - 0.5
    return ranks
