"""Plays the episodes of an evaluation."""

from collections.abc import Callable
from pathlib import Path

from lp_pipe.rl.environment_loop import EnvironmentLoop
from lp_pipe.rl.experiment import ExperimentConfig, Network, Policy, Spec
from lp_pipe.rl.experiment_parts import make_one
from lp_pipe.rl.rounds.evaluations import EvaluationDue
from lp_pipe.rl.video import FilmedEnvironment


class Evaluator:
    """Plays the episodes of an evaluation: the same seeds each time, none of which an actor has.

    run_dir: of videos; None if there are none.
    """

    def __init__(
        self,
        experiment: ExperimentConfig,
        spec: Spec,
        network: Network,
        run_dir: Path | None,
        before_call: Callable[[int, int, int, int], object] | None = None,
    ) -> None:
        self._experiment, self._run_dir = experiment, run_dir
        policy: Policy = experiment.builder.make_policy(network, spec, True)
        environment = self._environment = FilmedEnvironment(make_one(experiment, 0, 0, "evaluation"))
        seed = experiment.seed
        self._loop = EnvironmentLoop(environment, policy, seed=seed, role="evaluation", before_call=before_call)

    def returns(self, due: EvaluationDue) -> list[float]:
        """Play all episodes and return their sums of rewards; of a VectorEnv, each environment's first one counts."""
        found: list[float] = []
        if due.is_filmed:
            self._environment.begin()
        for number in range(-(-self._experiment.evaluation.episodes // self._loop.size)):
            self._loop.begin_at(number)
            first: dict[int, float] = {}
            while len(first) < self._loop.size:
                for episode in self._loop.run(num_episodes=1, counts=due.counts).episodes:
                    first.setdefault(episode.environment, episode.total)
            found += [first[index] for index in range(self._loop.size)]
            if number == 0 and due.is_filmed and self._run_dir is not None:
                self._environment.write(self._run_dir / "videos" / f"evaluation-{due.counts['env_steps']:09}.gif")
        return found[: self._experiment.evaluation.episodes]
