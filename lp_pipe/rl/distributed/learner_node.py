"""The node that learns, drives the other nodes of an experiment and saves checkpoints."""

import uuid
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import lp_pipe as lp
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.programs.generations import GenerationServer, StaleGeneration
from lp_pipe.programs.waiting import until_the_stop
from lp_pipe.rl.distributed.repeated_deaths import RepeatedDeaths
from lp_pipe.rl.distributed.replay_node import PackedRound
from lp_pipe.rl.experiment import ExperimentConfig, Rounds, Spec
from lp_pipe.rl.experiment_parts import make_network
from lp_pipe.rl.metrics import LearnerMetrics, log_in_node
from lp_pipe.rl.replay.node import ReplayPart
from lp_pipe.rl.results import keep_experiment
from lp_pipe.rl.rounds.experiment_table import ExperimentOptions
from lp_pipe.rl.rounds.rounds_learner import RoundsLearner
from lp_pipe.rl.tree import row

_STOP_PATIENCE_S = 2.0


class ExperimentLearner(GenerationServer):
    """The node that learns and drives the others. Its `run` is the experiment; calls only read what that has made."""

    def __init__(
        self, experiment: ExperimentConfig, spec: Spec, options: ExperimentOptions, replay: Any, counter: Any
    ) -> None:
        super().__init__()
        self._config, self._options, self._replay, self._counter = experiment, options, replay, counter
        self._deaths = RepeatedDeaths(f"learner-{lp.context().index}")
        with self._deaths.watched():
            keep_experiment(Path(lp.context().run_dir), experiment, spec)
            network = make_network(experiment, spec)
            self._learner = RoundsLearner(experiment.builder, network, spec, experiment.seed, options.order)
        self._lag = options.order.lag if isinstance(options.order, Rounds) else None
        self._good_enough: dict[int, bool] = {}  # by round, once the evaluations up to there are in
        self._waiting: dict[int, Future[Any]] = {}  # by round, calls whose results are for `_good_enough`
        self._finishing: Future[Any] | None = None
        self._counts: dict[str, int] = {}
        self._metrics = LearnerMetrics(log_in_node)

    async def begin(self, generation: str, number: int, needs_weights: bool) -> tuple[int, Any] | None:
        """Wait until an actor may begin a round; return learner steps and weights, or None: the experiment is over."""
        self._changes.attach()
        if self._lag is None:
            self._check(generation)
            is_over, found = any(self._good_enough.values()), self._learner.newest
        else:
            version = max(0, number - 1 - self._lag)
            await self._until(generation, lambda: version in self._good_enough)
            is_over, found = self._good_enough[version], self._version(version)
        if is_over:
            return None
        return found if needs_weights else (found[0], None)

    async def newer(self, known: int) -> tuple[int, Any]:
        """Wait for other weights than those after round `known`, and return them with their round.

        Raises:
            StaleGeneration: the program stops.
        """
        self._changes.attach()
        while self._generation is None or self._learner.round == known:
            await self._change()
        return self._learner.round, self._learner.newest[1]

    async def weights(self, generation: str, number: int) -> Any:
        """Return the weights after a learner round."""
        self._changes.attach()
        self._check(generation)
        return self._version(number)[1]

    async def variables(self) -> Any:
        """Return the newest weights."""
        return self._learner.newest[1]

    @until_the_stop()
    def run(self) -> None:
        try:
            with self._deaths.watched():
                self._run()
        except StaleGeneration:
            if not lp.wait_for_stop(_STOP_PATIENCE_S):  # another node may hear of the program's stop before this one
                raise

    def _run(self) -> None:
        parts = {"learner": self._learner, "replay": ReplayPart(self._replay), "counter": self._counter}
        checkpoints = Checkpoints(parts)
        checkpoints.begin(self)
        while not lp.stop_event().is_set():
            with checkpoints.recovering(self):
                try:
                    self._go_on(checkpoints)
                finally:
                    self._publish(None)
                lp.stop()
                return

    def current_step(self) -> int:
        """Return how many rounds are done (for `Checkpoints`)."""
        return self._learner.round

    def recover(self) -> None:
        """Do nothing: the first call of a node that is restarted waits until it is up (for `Checkpoints`)."""

    def _go_on(self, checkpoints: Checkpoints) -> None:
        """Open a generation, and learn in rounds until the end.

        Raises:
            Unavailable: a node has died.
            StaleGeneration: the program stops.
        """
        generation = uuid.uuid4().hex
        number = self._learner.round
        is_last = self._replay.open(generation, self._options)
        due = self._counter.open(generation, self._config.evaluation, self._counts)
        self._good_enough, self._waiting, self._finishing = {0: False}, {}, None
        self._learner.pinned = set(due)
        for version in due if self._lag is None else range(max(1, number - self._lag), number + 1):
            self._ask(generation, version)
        self._publish(generation)
        while not is_last and not self._is_good_enough(number):
            number += 1
            packed = self._samples_for(generation, number)
            if packed is None:
                break
            is_last = packed.is_last
            steps_before, age = self._learner.steps, self._learner.steps - self._learner.version_for(number)[0]
            samples = [row(packed.samples, place) for place in range(packed.num_samples)]
            priorities = self._learner.learn(samples, lambda step: self._deaths.at(number, step))  # noqa: B023
            self._deaths.leave(number)
            self._changes.notify_from_outside()
            self._finishing = self._replay.futures.finish(generation, number, priorities)
            self._counts = {**packed.counts, "learner_steps": self._learner.steps}
            if self._counter.add_round(generation, number, self._counts, is_last):
                self._learner.pinned.add(number)
                self._ask(generation, number)
            elif self._lag is not None:
                self._ask(generation, number)
            self._metrics.add(self._learner, self._counts, age, is_last)
            every = self._config.checkpoint_every
            if self._learner.steps // every > steps_before // every:
                self._result_of(self._finishing)
                checkpoints.save(number, wait=False)
        if self._finishing is not None:
            self._result_of(self._finishing)
        self._learner.pinned.add(self._learner.round)
        self._result_of(self._counter.futures.end(generation))
        checkpoints.save(self._learner.round)

    def _samples_for(self, generation: str, number: int) -> PackedRound | None:
        """Wait for the samples of a round; None: in free order an evaluation has meanwhile ended the experiment."""
        call = self._replay.futures.learn(generation, number)
        while self._lag is None and not call.done():
            self._wait_for(call)
            if self._is_good_enough(number):
                call.cancel()
                return None
        packed: PackedRound = self._result_of(call)
        return packed

    def _ask(self, generation: str, number: int) -> None:
        """Ask whether the evaluations up to a round are good enough; the answer lets actors begin a later round."""
        call = self._counter.futures.is_good_enough(generation, number)
        self._waiting[number] = call

        def take(answered: "Future[bool]") -> None:
            if not answered.cancelled() and answered.exception() is None and self._waiting.get(number) is answered:
                self._good_enough[number] = answered.result()
                self._learner.pinned.discard(number)
                self._changes.notify_from_outside()

        call.add_done_callback(take)
        if self._lag is not None:
            for old in [one for one in self._waiting if one < number - self._lag]:
                del self._waiting[old]
                self._good_enough.pop(old, None)

    def _is_good_enough(self, number: int) -> bool:
        """Return whether the experiment ends before the next round; in free order by the evaluations that are in."""
        if self._lag is None:
            return any(bool(one.result()) for one in self._waiting.values() if one.done())
        return number > self._lag and bool(self._result_of(self._waiting[number - self._lag]))

    def _result_of(self, call: "Future[Any]") -> Any:
        """Wait for a call, unless another one fails: what it waits for may then never happen."""
        while not call.done():
            self._wait_for(call)
        return call.result()

    def _wait_for(self, call: "Future[Any]") -> None:
        """Wait until this call or one of the others that are in progress is done; raise the error of another one."""
        others = [one for one in (*self._waiting.values(), self._finishing) if one is not None and one is not call]
        for one in others:
            if one.done():
                one.result()
        wait([call, *(one for one in others if not one.done())], return_when=FIRST_COMPLETED)

    def _version(self, number: int) -> tuple[int, Any]:
        """Return the learner steps and weights after a learner round.

        Raises:
            StaleGeneration: no actor of this generation needs them any more: the caller was taken for dead.
        """
        found = self._learner.versions.get(number)
        if found is None:
            raise StaleGeneration(f"the weights of round {number} are no longer needed")
        return found

    def _publish(self, generation: str | None) -> None:
        self._generation = generation
        self._changes.notify_from_outside()
