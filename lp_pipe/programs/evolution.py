"""The arithmetic of evolution strategies: the same on the learner and on every worker, to the last bit."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
# Of each antithetic pair, in order: the returns of the parameters plus and minus its perturbation.
Returns = Sequence[tuple[float, float]]


class EvolutionProblem(Protocol):
    """What is to be maximized."""

    @property
    def num_parameters(self) -> int: ...

    def try_out(self, parameters: Vector, seed: tuple[int, ...]) -> float:
        """The return of one trial: a function of its arguments."""

    def evaluate(self, parameters: Vector) -> float:
        """The score that the target is for: a function of the parameters."""


@dataclass(frozen=True)
class Settings:
    """num_pairs: antithetic pairs in an iteration; sigma: the perturbations' standard deviation."""

    num_pairs: int = 16
    sigma: float = 0.1
    learning_rate: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_pairs < 1 or self.sigma <= 0:
            raise ValueError(f"evolution strategies: num_pairs={self.num_pairs}, sigma={self.sigma}: must be positive")


class Evolution:
    """Parameters that change by the returns of their perturbations; they begin as zeros."""

    def __init__(self, num_parameters: int, settings: Settings) -> None:
        self.parameters: Vector = np.zeros(num_parameters)
        self.iteration = 0
        self._settings = settings

    def try_pair(self, problem: EvolutionProblem, pair: int) -> tuple[float, float]:
        """The returns of the parameters plus and minus the pair's perturbation, in the same trial."""
        step = self._settings.sigma * self._noise(pair)
        seed = (self._settings.seed, self.iteration, pair)
        return _return_of(problem, self.parameters + step, seed), _return_of(problem, self.parameters - step, seed)

    def update(self, returns: Returns) -> None:
        """Move along the perturbations, each by the ranks of its pair's returns (Salimans et al., algorithm 1)."""
        shaped = centered_ranks(np.asarray(returns))
        gradient = np.zeros_like(self.parameters)
        for pair, (plus, minus) in enumerate(shaped):  # one by one and elementwise: no library chooses the order
            gradient += (plus - minus) * self._noise(pair)
        gradient /= 2 * len(shaped) * self._settings.sigma
        self.parameters = self.parameters + self._settings.learning_rate * gradient
        self.iteration += 1

    def fingerprint(self) -> str:
        """sha256 of the parameters."""
        return hashlib.sha256(self.parameters.tobytes()).hexdigest()

    def _noise(self, pair: int) -> Vector:
        rng = np.random.default_rng((self._settings.seed, self.iteration, pair))
        return rng.standard_normal(len(self.parameters))


def _return_of(problem: EvolutionProblem, parameters: Vector, seed: tuple[int, ...]) -> float:
    """
    Raises:
        ValueError: it is no number. NaN would rank highest, so that the parameters follow whatever breaks the trial.
    """
    given = problem.try_out(parameters, seed)
    is_number = np.ndim(given) == 0 and given is not None and not isinstance(given, str | bytes)
    if not is_number or math.isnan(given):
        raise ValueError(f"evolution strategies: try_out(…, seed={seed}) gave {given!r}; a number is needed")
    return float(given)


def centered_ranks(values: Vector) -> Vector:
    """Ranks from -0.5 for the lowest to 0.5 for the highest; equal values share the mean of theirs.

    Were equal returns ranked by position, a population of perfect policies would still be pushed about.
    """
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean_ranks = ends - (counts + 1) / 2
    ranks: Vector = mean_ranks[inverse].reshape(values.shape) / max(1, values.size - 1) - 0.5
    return ranks
