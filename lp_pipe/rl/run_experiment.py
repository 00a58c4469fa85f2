"""Runs an experiment in this process, in one thread."""

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lp_pipe.checkpoint import Checkpoints
from lp_pipe.errors import NodeError
from lp_pipe.rl.environment_loop import EnvironmentFailed
from lp_pipe.rl.evaluator import Evaluator
from lp_pipe.rl.experiment import ExperimentConfig, Result, Rounds
from lp_pipe.rl.experiment_parts import ExperimentParts, make_environment, make_loop
from lp_pipe.rl.metrics import ActorMetrics, LearnerMetrics, Log, log_evaluation
from lp_pipe.rl.results import keep_experiment, result_of
from lp_pipe.rl.rounds.evaluations import Evaluations
from lp_pipe.rl.rounds.experiment_table import act_round
from lp_pipe.rl.rounds.saved_table import SavedTable, make_table
from lp_pipe.telemetry.metrics import MetricsLog, as_numbers
from lp_pipe.telemetry.run_folder import RunFolder


def run_experiment(experiment: ExperimentConfig, num_actors: int = 1, run_dir: Path | str | None = None) -> Result:
    """Run an experiment whose actors take turns, and return what it led to.

    run_dir: a folder for checkpoints, metrics.jsonl and videos. An experiment that was interrupted goes on from the
    newest checkpoint in it.

    Raises:
        NodeError: an environment failed; its message names actor, episode, step, seed and leaf.
        ValueError: the parts do not fit together, before any step of an environment.
        CheckpointError: the folder has checkpoints of another experiment.
    """
    if num_actors < 1:
        raise ValueError(f"run_experiment: num_actors must be at least 1, got {num_actors}")
    with one_torch_thread():
        return _Experiment(experiment, num_actors, None if run_dir is None else Path(run_dir)).run()


class _Experiment:
    """The parts of an experiment in one process."""

    def __init__(self, experiment: ExperimentConfig, num_actors: int, run_dir: Path | None) -> None:
        self._config = experiment
        environments = [make_environment(experiment, index) for index in range(num_actors)]
        parts = ExperimentParts(experiment, num_actors, environments[0])
        self._spec = spec = parts.spec
        self._acting, self._evaluated = copy.deepcopy(parts.network), copy.deepcopy(parts.network)
        self._table, self._learner = make_table(parts.options), parts.learner
        if experiment.evaluation.video_every is not None and run_dir is None:
            raise ValueError("run_experiment: video_every needs a folder for the videos: give run_dir")
        self._evaluations = Evaluations(experiment.evaluation)
        acting = experiment.builder.make_policy(self._acting, spec, False)
        self._actors = [make_loop(experiment, spec, acting, *actor) for actor in enumerate(environments)]
        self._evaluator = Evaluator(experiment, spec, self._evaluated, run_dir)
        self._checkpoints: Checkpoints | None = None
        self._metrics: MetricsLog | None = None
        self._actor_metrics = [
            ActorMetrics(self._log_of(f"actor/{index}"), experiment.observers) for index in range(num_actors)
        ]
        self._learner_metrics = LearnerMetrics(self._log_of("learner/0"))
        if run_dir is not None:
            keep_experiment(run_dir, experiment, spec)
            self._metrics = MetricsLog(RunFolder(run_dir).metrics)
            self._checkpoints = Checkpoints(self._parts(), run_dir / "checkpoints")
            if self._checkpoints.restore() is not None:
                for index, actor in enumerate(self._actors):
                    if (state := self._table.record_of(index).state) is not None:
                        with as_node_error("actor", index):
                            actor.restore(state)

    def run(self) -> Result:
        try:
            lag = self._config.order.lag if isinstance(self._config.order, Rounds) else 0
            while not self._table.is_over and not self._evaluations.is_good_enough(self._learner.round - lag):
                self._act()
                while self._table.is_ready(self._learner.round + 1) and not self._table.is_over:
                    self._learn(self._learner.round + 1)
            self._evaluations.request()
            self._evaluate()
            if self._checkpoints is not None:
                self._checkpoints.save(self._learner.round)
            parts: dict[str, Any] = {"learner": self._learner, "replay": self._table, "counter": self._evaluations}
            states = {name: part.state_dict() for name, part in parts.items()}
            return result_of(self._config, self._spec, states, self._evaluated)
        finally:
            for actor in self._actors:
                actor.close()
            if self._checkpoints is not None:
                self._checkpoints.wait_until_written()
            if self._metrics is not None:
                self._metrics.close()

    def _act(self) -> None:
        """Let the actors take turns, each in its next round."""
        for index, actor in enumerate(self._actors):
            number = self._table.record_of(index).number + 1
            start = self._table.start_of(index, number)
            if start is None or start.is_over or not self._table.may_go_on(index):
                continue
            learner_steps, weights = self._learner.version_for(number)
            self._acting.load_state_dict(weights)
            with as_node_error("actor", index):
                delivery = act_round(actor, start, learner_steps)
            if self._metrics is not None:
                self._actor_metrics[index].add(actor, start, delivery)
            self._table.deliver(index, number, delivery)

    def _learn(self, number: int) -> None:
        before, age = self._learner.steps, self._learner.steps - self._learner.version_for(number)[0]
        given = self._table.learn_from(number)
        self._table.finish(number, self._learner.learn(given.samples))
        counts = {**given.counts, "learner_steps": self._learner.steps}
        self._learner_metrics.add(self._learner, counts, age, given.is_last)
        self._evaluations.add_round(number, counts, given.is_last)
        self._evaluate()
        every = self._config.checkpoint_every
        if self._checkpoints is not None and self._learner.steps // every > before // every:
            self._checkpoints.save(number, wait=False)

    def _evaluate(self) -> None:
        """Do the evaluation that is due after the newest round, if there is one."""
        if (due := self._evaluations.next_due()) is not None:
            self._evaluated.load_state_dict(self._learner.versions[due.number][1])
            with as_node_error("evaluator", 0):
                returns = self._evaluator.returns(due)
            self._evaluations.add(due.number, returns)
            log_evaluation(self._log_of("evaluator/0"), due, returns)

    def _log_of(self, node: str) -> Log:
        """Return what takes the metrics of a part, which is a node of that name in a distributed experiment."""

        def log(metrics: Mapping[str, float], step: int) -> None:
            if self._metrics is not None:
                self._metrics.record(node, *as_numbers(metrics, step))

        return log

    def _parts(self) -> dict[str, Any]:
        return {"learner": self._learner, "replay": SavedTable(self._table), "counter": self._evaluations}


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch use one thread, if it is in use: sums, and so fingerprints, must not depend on the number of cores."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    if torch is not None:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch is not None:
            torch.set_num_threads(before)


@contextmanager
def as_node_error(label: str, index: int) -> Iterator[None]:
    """Raise an environment's failure as the error of a node."""
    try:
        yield
    except EnvironmentFailed as error:
        raise NodeError(label, index, type(error).__name__, str(error)) from error
