"""Acts for all actors of an experiment, in batches, in a node of its own."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from typing import Any

import numpy as np

import lp_pipe as lp
from lp_pipe.programs.generations import StaleGeneration, has_stopped
from lp_pipe.programs.waiting import until_the_stop
from lp_pipe.rl.distributed.repeated_deaths import RepeatedDeaths
from lp_pipe.rl.experiment import ExperimentConfig, Policy, Spec
from lp_pipe.rl.experiment_parts import make_network
from lp_pipe.rl.tree import leaves_of, row, tree_map


class InferenceServer:
    """The node with the acting network. A batch is acted on with the weights of one version, the newest that it has."""

    def __init__(self, experiment: ExperimentConfig, spec: Spec, learner: Any, batch_size: int, timeout: float) -> None:
        self._learner = learner
        self._deaths = RepeatedDeaths(f"inference-{lp.context().index}")
        with self._deaths.watched():
            self._network = make_network(experiment, spec)
            self._policy = experiment.builder.make_policy(self._network, spec, False)
        self._generator = np.random.default_rng((experiment.seed, time.time_ns()))
        self._using_network = threading.Lock()
        self._has_weights = threading.Event()
        self.act = lp.batched_handler(batch_size, timeout=timeout)(self._act)

    @until_the_stop()
    def run(self) -> None:
        """Fetch the learner's weights whenever there are new ones."""
        known = -1
        while not lp.stop_event().is_set():
            call = self._learner.futures.newer(known)
            wait([call])  # not call.result(): the next weights may take long, and a wait for a future is no hang
            try:
                known, weights = call.result()
            except (StaleGeneration, lp.Unavailable):
                known = -1
                has_stopped()
                continue
            with self._using_network, self._deaths.watched():
                self._network.load_state_dict(weights)
            self._has_weights.set()

    def _act(
        self, observations: Any, states: Any, env_steps: Sequence[int], actor_steps: Sequence[int], learner_steps: Any
    ) -> Any:
        """Act on a batch of requests, whose leaves have the axes request and environment."""
        while not self._has_weights.wait(_STOP_PATIENCE_S):
            if lp.stop_event().is_set():
                raise StaleGeneration("the program stops")
        num_requests = len(env_steps)
        counts = {"env_steps": max(env_steps), "actor_steps": max(actor_steps), "learner_steps": max(learner_steps)}
        joined = _without_first_axis(observations)
        before = None if isinstance(states, list) else _without_first_axis(states)
        with self._using_network:
            found = self._policy(joined, before, self._generator, counts)
        parts = tree_map(lambda leaf: np.asarray(leaf).reshape(num_requests, -1, *np.shape(leaf)[1:]), found)
        return [row(parts, place) for place in range(num_requests)]


_STOP_PATIENCE_S = 0.2


class RemotePolicy:
    """A policy that asks the inference node. local: the same policy here, for its initial state."""

    def __init__(self, local: Policy, server: Any) -> None:
        self._server = server
        self._size = 0
        initial = getattr(local, "initial_state", None)
        if initial is not None:
            self.initial_state = initial

    def __call__(
        self, observations: Any, state: Any, generator: np.random.Generator, counts: Mapping[str, int]
    ) -> tuple[Any, Any, Any]:
        size = next(len(leaf) for _, leaf in leaves_of(observations))
        self._size = max(self._size, size)
        if size < self._size:  # requests of a batch have one shape: the last one is repeated
            places = np.minimum(np.arange(self._size), size - 1)
            observations, state = row(observations, places), row(state, places)
        numbers = counts["env_steps"], counts["actor_steps"], counts["learner_steps"]
        actions, state, extras = self._server.act(observations, state, *numbers)
        return row(actions, slice(size)), row(state, slice(size)), row(extras, slice(size))


def _without_first_axis(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)
