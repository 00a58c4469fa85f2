"""Evolution strategies: workers try perturbed policies, and only seeds and returns travel.

    lp_pipe launch lp_pipe.programs.evolution_strategies -- --num_workers=2

                  +--- try_out(iteration, pairs, past returns) ---> workers/0
    learner ------+--- try_out(iteration, pairs, past returns) ---> workers/1      <--- returns, fingerprint

Perturbation i of an iteration follows from (seed, iteration, i). So a worker that knows the returns of all iterations
so far can generate every noise vector again, and computes the same parameters to the last bit. No parameter is ever
sent. Source: Salimans et al., "Evolution Strategies as a Scalable Alternative to Reinforcement Learning" (2017):
algorithm 2; antithetic sampling and rank shaping as in its section 2.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

import lp_pipe as lp
from lp_pipe.nodes import user_code
from lp_pipe.programs.evolution import Evolution, EvolutionProblem, Returns, Settings, Vector
from lp_pipe.programs.options import option, parse_options, require
from lp_pipe.programs.waiting import until_the_stop


@dataclass(frozen=True)
class EvolutionResult:
    """The learned parameters. score: the last of `problem.evaluate`; fingerprint: the sha256 of the parameters."""

    parameters: Vector
    score: float
    iterations: int
    fingerprint: str
    is_solved: bool


OnResult = Callable[[EvolutionResult], object]


def evolution_strategies(
    make_problem: Callable[[], EvolutionProblem],
    *,
    num_workers: int,
    on_result: OnResult,
    settings: Settings | None = None,
    iterations: int = 100,
    target: float = float("inf"),
    evaluate_every: int = 5,
    name: str = "evolution_strategies",
) -> lp.Program:
    """Return a program that changes parameters until the problem's `evaluate` reaches `target`.

    make_problem: called in every node, to make the node's own problem.
    on_result: called once, in the learner's node.
    iterations: stop after so many. evaluate_every: iterations between evaluations.

    The result depends only on the problem and the settings, not on the number of workers. A worker that dies is
    restarted and computes its parameters from the returns so far.

    Raises:
        ValueError: a number is below 1.
    """
    if min(num_workers, iterations, evaluate_every) < 1:
        numbers = f"num_workers={num_workers}, iterations={iterations}, evaluate_every={evaluate_every}"
        raise ValueError(f"{name}: each number must be at least 1, got {numbers}")
    settings = settings or Settings()
    program = lp.Program(name)
    with program.group("workers", on_failure="restart"):
        workers = [
            program.add_node(lp.CourierNode(EvolutionWorker, make_problem, settings)) for _ in range(num_workers)
        ]
    stopping = Stopping(iterations, target, evaluate_every)
    program.add_node(
        lp.PyClassNode(EvolutionLearner, workers, make_problem, settings, stopping, on_result), label="learner"
    )
    return program


@dataclass(frozen=True)
class PairReturns:
    """A worker's reply: the returns of its pairs, and the sha256 of the parameters that it perturbed."""

    returns: Returns
    fingerprint: str


class Behind(RuntimeError):
    """A worker cannot compute the parameters: it lacks returns of earlier iterations."""


class EvolutionWorker:
    """A node that follows the learner's parameters by the returns it is told, and tries out perturbations of them."""

    def __init__(self, make_problem: Callable[[], EvolutionProblem], settings: Settings) -> None:
        self._problem = make_problem()
        self._evolution = Evolution(self._problem.num_parameters, settings)

    def iteration(self) -> int:
        """Return the iteration of its parameters; 0 after a start or restart."""
        return self._evolution.iteration

    def try_out(self, first_iteration: int, past: Sequence[Returns], pairs: range) -> PairReturns:
        """Apply the returns of the iterations from `first_iteration` on, then try out these pairs of the next one.

        Raises:
            Behind: this worker was restarted and lacks earlier returns.
        """
        if self._evolution.iteration < first_iteration:
            raise Behind(
                f"this worker has iteration {self._evolution.iteration}, but got returns from {first_iteration} on"
            )
        for returns in past[self._evolution.iteration - first_iteration :]:
            self._evolution.update(returns)
        returns = [self._evolution.try_pair(self._problem, pair) for pair in pairs]
        return PairReturns(returns, self._evolution.fingerprint())


@dataclass(frozen=True)
class Stopping:
    """The conditions under which the learner is done."""

    iterations: int
    target: float
    evaluate_every: int


class EvolutionLearner:
    """A node that distributes the pairs of each iteration, collects their returns, and ends the program."""

    def __init__(
        self,
        workers: Sequence[lp.CourierClient],
        make_problem: Callable[[], EvolutionProblem],
        settings: Settings,
        stopping: Stopping,
        on_result: OnResult,
    ) -> None:
        self._workers = workers
        self._problem = make_problem()
        self._stopping = stopping
        self._on_result = on_result
        self._evolution = Evolution(self._problem.num_parameters, settings)
        self._pairs = [range(settings.num_pairs)[rank :: len(workers)] for rank in range(len(workers))]
        self._history: list[Returns] = []

    @until_the_stop()
    def run(self) -> None:
        score = float("-inf")
        while self._evolution.iteration < self._stopping.iterations and score < self._stopping.target:
            self._iterate()
            if self._is_due():
                score = self._problem.evaluate(self._evolution.parameters)
                lp.log_metrics({"score": score}, step=self._evolution.iteration)
        user_code.call(
            self._on_result,
            EvolutionResult(
                self._evolution.parameters,
                score,
                self._evolution.iteration,
                self._evolution.fingerprint(),
                is_solved=score >= self._stopping.target,
            ),
        )
        lp.stop()

    def _is_due(self) -> bool:
        done, stopping = self._evolution.iteration, self._stopping
        return done % stopping.evaluate_every == 0 or done == stopping.iterations

    def _iterate(self) -> None:
        calls = [self._ask(rank, self._evolution.iteration - 1) for rank in range(len(self._workers))]
        returns: dict[int, tuple[float, float]] = {}
        for rank, call in enumerate(calls):
            trial = self._returns(rank, call)
            self._check(rank, trial)
            returns.update(zip(self._pairs[rank], trial.returns, strict=True))
        in_order = [returns[pair] for pair in range(len(returns))]
        self._history.append(in_order)
        self._evolution.update(in_order)
        lp.log_metrics(
            {"mean_return": float(np.mean(in_order)), "total_steps": self._stopping.iterations},
            step=self._evolution.iteration,
        )

    def _ask(self, rank: int, first_iteration: int) -> "Future[PairReturns]":
        first = max(0, first_iteration)
        call: Future[PairReturns] = self._workers[rank].futures.try_out(first, self._history[first:], self._pairs[rank])
        return call

    def _returns(self, rank: int, call: "Future[PairReturns] | None") -> PairReturns:
        """Return a worker's reply; if the worker has died, ask it again after its restart, with all earlier returns.

        Asking twice changes nothing: a trial is a function of seeds and returns. The loop ends because a node is
        restarted only a few times before the program stops.
        """
        while True:
            try:
                return call.result() if call else self._ask(rank, self._workers[rank].iteration()).result()
            except (lp.Unavailable, Behind):
                if lp.stop_event().is_set():
                    raise
            call = None

    def _check(self, rank: int, trial: PairReturns) -> None:
        if trial.fingerprint != self._evolution.fingerprint():
            raise RuntimeError(
                f"workers/{rank} has other parameters than the learner in iteration {self._evolution.iteration}, "
                "because its machine rounds differently: run all nodes on one kind of machine and version of numpy"
            )


# --- The example: a pole on a cart ---

_NUM_OBSERVATIONS = 4
_EVALUATION_SEED = 10**6


class CartPole:
    """The problem of keeping the pole up for at most 500 steps; the return is the number of steps."""

    def __init__(self, num_hidden: int = 8, num_evaluation_episodes: int = 100) -> None:
        self._num_hidden = num_hidden
        self._num_evaluation_episodes = num_evaluation_episodes
        self._environment = require("gymnasium", "gymnasium").make("CartPole-v1", disable_env_checker=True)

    @property
    def num_parameters(self) -> int:
        inputs = _NUM_OBSERVATIONS + 1  # and a bias
        return inputs * self._num_hidden + self._num_hidden + 1 if self._num_hidden else inputs

    def try_out(self, parameters: Vector, seed: tuple[int, ...]) -> float:
        return self._play(parameters, int(np.random.default_rng(seed).integers(2**31)))

    def evaluate(self, parameters: Vector) -> float:
        """Return the mean return of a fixed set of episodes."""
        episodes = range(self._num_evaluation_episodes)
        return float(np.mean([self._play(parameters, _EVALUATION_SEED + episode) for episode in episodes]))

    def _play(self, parameters: Vector, seed: int) -> float:
        observation, _ = self._environment.reset(seed=seed)
        total, is_over = 0.0, False
        while not is_over:
            observation, reward, has_fallen, is_late, _ = self._environment.step(self._act(parameters, observation))
            total += float(reward)
            is_over = has_fallen or is_late
        return total

    def _act(self, parameters: Vector, observation: Vector) -> int:
        inputs = np.append(observation, 1.0)
        if not self._num_hidden:
            return int(parameters @ inputs > 0)
        split = len(inputs) * self._num_hidden
        hidden = np.tanh(parameters[:split].reshape(self._num_hidden, -1) @ inputs)
        return int(parameters[split:-1] @ hidden + parameters[-1] > 0)


@dataclass(frozen=True)
class EvolutionOptions:
    """Learn to balance gymnasium's CartPole-v1 with evolution strategies."""

    num_workers: int = option(2, "nodes that try out policies", at_least=1)
    iterations: int = option(60, "iterations at most", at_least=1)
    num_pairs: int = option(16, "pairs of policies per iteration", at_least=1)
    num_hidden: int = option(8, "hidden units of the policy; 0 makes it linear", at_least=0)
    seed: int = option(0, "seed of perturbations and episodes", at_least=0)


def print_result(result: EvolutionResult) -> None:
    verdict = "solved" if result.is_solved else "not solved"
    print(f"{verdict}: mean return {result.score:.1f} after {result.iterations} iterations")
    print(f"{len(result.parameters)} parameters, sha256 {result.fingerprint}", flush=True)


def make_program() -> lp.Program:
    """Make the example with the options given by flags."""
    options = parse_options(EvolutionOptions, "lp_pipe.programs.evolution_strategies")
    require("gymnasium", "gymnasium")  # raises here, before anything is launched
    return evolution_strategies(
        functools.partial(CartPole, options.num_hidden),
        num_workers=options.num_workers,
        on_result=print_result,
        settings=Settings(num_pairs=options.num_pairs, seed=options.seed),
        iterations=options.iterations,
        target=475.0,
    )
