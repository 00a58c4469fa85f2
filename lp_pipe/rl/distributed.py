"""An experiment as a program: the same rounds as in one process, with a node for each part.

    actor/0 --- deliver ---> replay <--- learn, finish --- learner --- add_round ---> counter <--- add --- evaluator
       ^ +---- begin (weights) ----------------------------> |                                               |
                                                             +<------------------- weights ------------------+

A round of an actor is two calls: `begin` waits for the weights of the round, `deliver` says what was done, and returns
how many steps are next. The learner drives: it asks the replay node for the samples of a round, learns, and saves
checkpoints between two rounds.

An actor that dies loses nothing: the replay node knows what it has delivered, and its successor plays the episodes
again until there. If the learner, the replay node or the counter dies, the learner takes all three back to the newest
checkpoint under the name of a new generation, and the actors follow. All this has no influence on the result.
"""

import time
import uuid
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, NamedTuple

import lp_pipe as lp
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.programs.generations import GenerationServer, StaleGeneration, has_stopped
from lp_pipe.programs.waiting import until_the_stop
from lp_pipe.rl.environment_loop import EnvironmentLoop
from lp_pipe.rl.experiment import Evaluation, ExperimentConfig, Inference, Rounds, Spec
from lp_pipe.rl.inference import InferenceServer, RemotePolicy
from lp_pipe.rl.metrics import ActorMetrics, LearnerMetrics, log_evaluation
from lp_pipe.rl.repeated_deaths import RepeatedDeaths
from lp_pipe.rl.replay.node import ReplayPart
from lp_pipe.rl.replay.snapshot import Snapshots
from lp_pipe.rl.rounds import (
    ActorRecord,
    Delivery,
    EvaluationDue,
    Evaluations,
    ExperimentOptions,
    ExperimentTable,
    RoundsLearner,
    RoundStart,
    act_round,
    make_table,
    read_table,
)
from lp_pipe.rl.run_experiment import (
    Evaluator,
    ExperimentParts,
    keep_experiment,
    make_environment,
    make_loop,
    make_network,
)
from lp_pipe.rl.tree import row, stacked

_STOP_PATIENCE_S = 2.0


def make_distributed_experiment(
    experiment: ExperimentConfig, num_actors: int = 1, *, inference: Inference | None = None
) -> lp.Program:
    """Return a program with the groups learner, replay, counter, actor and evaluator; `rl.load(run.run_dir)` reads it.

    An environment is made here, to see whether all parts fit. inference: a node of that group acts for all actors.

    Raises:
        ValueError: the parts do not fit together.
    """
    if num_actors < 1:
        raise ValueError(f"make_distributed_experiment: num_actors must be at least 1, got {num_actors}")
    environments = make_environment(experiment, 0)
    parts = ExperimentParts(experiment, num_actors, environments)
    for environment in environments if isinstance(environments, list) else [environments]:
        environment.close()
    program = lp.Program("experiment")
    with program.group("replay", on_failure="restart", max_restarts=None):
        replay = program.add_node(lp.CourierNode(ExperimentReplay))
    with program.group("counter", on_failure="restart", max_restarts=None):
        counter = program.add_node(lp.CourierNode(ExperimentCounter))
    with program.group("learner", on_failure="restart", max_restarts=None):
        node = lp.CourierNode(ExperimentLearner, experiment, parts.spec, parts.options, replay, counter)
        learner = program.add_node(node)
    acting = None
    if inference is not None:
        size = inference.batch_size or num_actors
        with program.group("inference", on_failure="restart", max_restarts=None):
            server = lp.CourierNode(InferenceServer, experiment, parts.spec, learner, size, inference.timeout)
            acting = program.add_node(server)
    with program.group("actor", on_failure="restart", max_restarts=None):
        for _ in range(num_actors):
            program.add_node(lp.PyNode(act, experiment, parts.spec, replay, learner, acting))
    with program.group("evaluator", on_failure="restart", max_restarts=None):
        program.add_node(lp.PyNode(evaluate, experiment, parts.spec, learner, counter))
    return program


class JoinedActor(NamedTuple):
    """What an actor begins a generation with."""

    generation: str
    record: ActorRecord


class PackedRound(NamedTuple):
    """What a learner gets for a round, with the samples in one tree, whose leaves have a first axis of samples."""

    num_samples: int
    samples: Any
    counts: dict[str, int]
    is_last: bool


class ExperimentReplay(GenerationServer):
    """The node with the table, which also knows what each actor has done."""

    def __init__(self) -> None:
        super().__init__()
        self._table: ExperimentTable | None = None
        self._snapshots = Snapshots()

    async def open(self, generation: str, options: ExperimentOptions) -> bool:
        """Begin a generation; return whether the last round was learned."""
        if self._table is None:
            self._table = make_table(options)
        self._table.check(options)
        self._generation = generation
        self._changes.notify()
        return self._table.is_over

    async def join(self, actor: int, after: str | None) -> JoinedActor:
        """Wait for another generation than `after`, and return what the actor has done.

        Raises:
            StaleGeneration: the program stops.
        """
        generation = await self._until_opened(after)
        return JoinedActor(generation, self._opened.record_of(actor))

    async def start(self, generation: str, actor: int, number: int) -> RoundStart:
        """Wait until it is known what the actor does in a round."""
        found: list[RoundStart] = []

        def is_known() -> bool:
            start = self._opened.start_of(actor, number)
            found.extend([] if start is None else [start])
            return start is not None

        await self._until(generation, is_known)
        return found[0]

    async def deliver(self, generation: str, actor: int, number: int, delivery: Delivery) -> RoundStart:
        """Take what an actor has done in a round; wait until it is known what it does in the next one."""
        self._check(generation)
        self._opened.deliver(actor, number, delivery)
        self._changes.notify()
        await self._until(generation, lambda: self._opened.may_go_on(actor))
        return await self.start(generation, actor, number + 1)

    async def learn(self, generation: str, number: int) -> PackedRound:
        """Wait until all actors have delivered a round, and return the samples that it is good for."""
        await self._until(generation, lambda: self._opened.is_ready(number))
        samples, counts, is_last = self._opened.learn_from(number)
        self._changes.notify()
        return PackedRound(len(samples), stacked(samples) if samples else None, counts, is_last)

    async def finish(self, generation: str, number: int, priorities: list[Any]) -> None:
        """Take the priorities of a round's samples."""
        self._check(generation)
        self._opened.finish(number, priorities)
        self._changes.notify()

    async def info(self) -> dict[str, dict[str, int]]:
        """Return the counts of the table."""
        return {"replay": {} if self._table is None else self._table.table.info()}

    async def take_snapshot(self) -> None:
        """Take all that depends on the past as it is now, for `write_snapshot`."""
        table = self._table
        self._snapshots.take(None if table is None else table.own_state(), [] if table is None else [table.table])

    def write_snapshot(self, path: Path) -> dict[str, str]:
        """Write the snapshot into a new folder; return the sha256 of the files. The table goes on meanwhile."""
        return self._snapshots.write(path)

    async def load_state_dict(self, path: Path) -> None:
        """Continue from the state in a folder, in the next generation."""
        self._generation, self._table = None, None
        self._table = read_table(path)
        self._changes.notify()

    @property
    def _opened(self) -> ExperimentTable:
        assert self._table is not None, "calls with a generation come after `open`"
        return self._table


class ExperimentCounter(GenerationServer):
    """The node with the counts of the experiment and its evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self._evaluations = Evaluations()
        self._shown: dict[str, int] = {}

    async def open(self, generation: str, evaluation: Evaluation, shown: Mapping[str, int]) -> list[int]:
        """Begin a generation; return the rounds after which an evaluation is to be done.

        shown: the largest counts that were ever given: after going back `get` returns no lower ones.
        """
        self._show(shown)
        state = self._evaluations.state_dict()
        self._evaluations = Evaluations(evaluation)
        self._evaluations.load_state_dict(state)
        self._generation = generation
        self._changes.notify()
        return self._evaluations.all_due()

    async def add_round(self, generation: str, number: int, counts: Mapping[str, int], is_last: bool) -> bool:
        """Take the counts after a round; return whether they make an evaluation due."""
        self._check(generation)
        self._show(counts)
        is_due = self._evaluations.add_round(number, counts, is_last)
        self._changes.notify()
        return is_due

    async def is_good_enough(self, generation: str, number: int) -> bool:
        """Wait for the evaluations up to a round; return whether the experiment ends because of them."""
        await self._until(generation, lambda: self._evaluations.are_in(number))
        return self._evaluations.is_good_enough(number)

    async def end(self, generation: str) -> None:
        """Let the newest weights be evaluated, and wait until all evaluations are in."""
        self._check(generation)
        self._evaluations.request()
        self._changes.notify()
        await self._until(generation, lambda: self._evaluations.next_due() is None)

    async def next_due(self) -> tuple[str, EvaluationDue]:
        """Wait for an evaluation that is to be done; return it, with the generation.

        Raises:
            StaleGeneration: the program stops.
        """
        while self._generation is None or (due := self._evaluations.next_due()) is None:
            await self._change()
        return self._generation, due

    async def add(self, generation: str, number: int, returns: list[float]) -> None:
        """Take the returns of an evaluation."""
        self._check(generation)
        self._evaluations.add(number, returns)
        self._changes.notify()

    async def get(self) -> dict[str, int]:
        """Return the counts after the newest round that was learned. They never become less."""
        await self._until_opened()  # the learner then tells what was shown before a death
        self._show(self._evaluations.counts)
        return dict(self._shown)

    def _show(self, counts: Mapping[str, int]) -> None:
        self._shown |= {name: max(count, self._shown.get(name, 0)) for name, count in counts.items()}

    async def curve(self) -> list[tuple[int, float]]:
        """Return the environment steps and score of every evaluation."""
        return self._evaluations.curve

    async def state_dict(self) -> dict[str, Any]:
        return self._evaluations.state_dict()

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, in the next generation."""
        self._generation = None
        self._evaluations.load_state_dict(state)
        self._changes.notify()


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
        self._metrics = LearnerMetrics(_log)

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


@until_the_stop()
def act(experiment: ExperimentConfig, spec: Spec, replay: Any, learner: Any, inference: Any) -> None:
    """Act in rounds, for one generation after another; the function of an actor's node."""
    actor = _Actor(experiment, spec, replay, learner, inference)
    while not lp.stop_event().is_set():
        try:
            actor.act_for_a_generation()
        except (StaleGeneration, lp.Unavailable):
            has_stopped()


class _Actor:
    """The actor of a node, in one generation after another."""

    def __init__(self, experiment: ExperimentConfig, spec: Spec, replay: Any, learner: Any, inference: Any) -> None:
        self._config, self._spec, self._replay, self._learner = experiment, spec, replay, learner
        self._inference = inference
        self._index = lp.context().index
        self._deaths = RepeatedDeaths(f"actor-{self._index}")
        with self._deaths.watched():
            self._network = make_network(experiment, spec)
        self._generation: str | None = None
        self._round = 0
        self._metrics = ActorMetrics(_log, experiment.observers)

    def act_for_a_generation(self) -> None:
        """Act until the generation ends, which raises StaleGeneration or Unavailable."""
        generation, record = _result(self._replay.futures.join(self._index, self._generation))
        with self._deaths.watched():
            self._deaths.at(-1, -1)  # an environment may end the process
            environments = make_environment(self._config, self._index)
            policy = self._config.builder.make_policy(self._network, self._spec, False)
            if self._inference is not None:
                policy = RemotePolicy(policy, self._inference)
            loop = make_loop(self._config, self._spec, policy, self._index, environments, self._mark)
        try:
            if record.state is not None:
                with self._deaths.watched():
                    loop.restore(record.state)
            start = _result(self._replay.futures.start(generation, self._index, record.number + 1))
            while not start.is_over:
                begun = time.perf_counter()
                needs_weights = self._inference is None
                version = _result(self._learner.futures.begin(generation, start.number, needs_weights))
                if version is None:
                    break
                self._metrics.waited_s += time.perf_counter() - begun
                delivery = self._act(loop, start, *version)
                begun = time.perf_counter()
                start = _result(self._replay.futures.deliver(generation, self._index, start.number, delivery))
                self._metrics.waited_s += time.perf_counter() - begun
        finally:
            loop.close()
        self._generation = generation
        _result(self._replay.futures.outlive(generation))

    def _act(self, loop: EnvironmentLoop, start: RoundStart, learner_steps: int, weights: Any) -> Delivery:
        self._round = start.number
        with self._deaths.watched():
            if weights is not None:
                self._network.load_state_dict(weights)
            delivery = act_round(loop, start, learner_steps)
            self._metrics.add(loop, start, delivery)  # it calls observers, which may fail
        return delivery

    def _mark(self, actor_steps: int, episode: int, step: int, seed: int) -> None:
        self._deaths.at(self._round, actor_steps, episode, step, seed)


@until_the_stop()
def evaluate(experiment: ExperimentConfig, spec: Spec, learner: Any, counter: Any) -> None:
    """Do the evaluations that are due; the function of an evaluator's node."""
    deaths = RepeatedDeaths(f"evaluator-{lp.context().index}")
    number = 0
    with deaths.watched():
        network = make_network(experiment, spec)
        folder = Path(lp.context().run_dir)
        evaluator = Evaluator(experiment, spec, network, folder, lambda *place: deaths.at(number, *place))
    while not lp.stop_event().is_set():
        try:
            generation, due = _result(counter.futures.next_due())
            number = due.number
            weights = learner.weights(generation, number)
            with deaths.watched():
                network.load_state_dict(weights)
                returns = evaluator.returns(due)
            counter.add(generation, number, returns)
            log_evaluation(_log, due, returns)
        except (StaleGeneration, lp.Unavailable):
            has_stopped()


def _log(metrics: Mapping[str, float], step: int) -> None:
    lp.log_metrics(metrics, step=step)


def _result(call: "Future[Any]") -> Any:
    """Wait for a call that waits for what others do, which may take long: a wait for a future is no hang."""
    wait([call])
    return call.result()
