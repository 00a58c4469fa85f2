"""What an experiment has led to, from the states of its parts or from its folder."""

import hashlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from lp_pipe.checkpoint import Checkpoints
from lp_pipe.errors import CheckpointError
from lp_pipe.rl.experiment import ExperimentConfig, Network, Policy, Result, Spec
from lp_pipe.rl.experiment_parts import make_network
from lp_pipe.rl.rounds.evaluations import Evaluations
from lp_pipe.rl.rounds.saved_table import SavedTable
from lp_pipe.rl.seeding import seed_sequence
from lp_pipe.rl.spaces import fitted
from lp_pipe.rl.tree import row, stacked


def load(run_dir: Path | str) -> Result:
    """Return what an experiment in this folder has led to; of one that was stopped, until its newest checkpoint.

    Loading unpickles files: load only what you trust as you trust code.

    Raises:
        FileNotFoundError: the folder has no experiment.
        CheckpointError: it has no undamaged checkpoint.
    """
    folder = Path(run_dir)
    experiment, spec = cloudpickle.loads((folder / _EXPERIMENT).read_bytes())
    kept: dict[str, Any] = {"learner": _Kept(), "replay": SavedTable(), "counter": _Kept()}
    found = Checkpoints(kept, folder / "checkpoints").restore()
    if found is None or kept["replay"].state is None:
        raise CheckpointError(f"{folder} has no checkpoint yet: the experiment had just begun")
    states = {name: part.state for name, part in kept.items()}
    return result_of(experiment, spec, states, make_network(experiment, spec))


def keep_experiment(run_dir: Path, experiment: ExperimentConfig, spec: Spec) -> None:
    """Write what `load` needs besides a checkpoint."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / _EXPERIMENT).write_bytes(cloudpickle.dumps((experiment, spec)))


_EXPERIMENT = "experiment.pickle"


class _Kept:
    """A part that keeps the state that it gets."""

    state: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def result_of(experiment: ExperimentConfig, spec: Spec, states: Mapping[str, Any], network: Network) -> Result:
    """Return what an experiment has led to, from the states of its parts. network: for the result's policy."""
    learner, table, evaluations = states["learner"], states["replay"], Evaluations()
    evaluations.load_state_dict(states["counter"])
    variables = learner["versions"][learner["round"]][1]
    counts = dict(evaluations.counts)
    restarts = counts.pop("environment_restarts")
    curve, returns = evaluations.curve, evaluations.returns
    fingerprint = fingerprint_of(variables, learner["learner"], table["table"], counts, curve, returns)
    network.load_state_dict(variables)
    policy = policy_of_one(experiment.builder.make_policy(network, spec, True), spec, experiment.seed)
    counts["environment_restarts"] = restarts
    return Result(policy, curve[-1][1] if curve else float("nan"), counts, curve, fingerprint)


def policy_of_one(policy: Policy, spec: Spec, seed: int) -> Callable[[Any], Any]:
    """Return the policy as a function of one observation; it starts each time from the initial state."""

    def act(observation: Any) -> Any:
        initial = getattr(policy, "initial_state", None)
        generator = np.random.default_rng(seed_sequence(seed, "result", 0, 0))
        batch = stacked([fitted(spec.observation_space, observation, "observation")])
        counts = {"env_steps": 0, "actor_steps": 0, "learner_steps": 0}
        actions, _, _ = policy(batch, None if initial is None else initial(1), generator, counts)
        return row(actions, 0)

    return act


def fingerprint_of(*trees: Any) -> str:
    """Return the sha256 of trees of arrays, tensors, numbers and strings: of structure, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for tree in trees:
        _add_to(digest, tree)
    return digest.hexdigest()


def _add_to(digest: "hashlib._Hash", tree: Any) -> None:
    if isinstance(tree, Mapping):
        digest.update(b"{")
        for name in sorted(tree, key=repr):
            digest.update(repr(name).encode())
            _add_to(digest, tree[name])
        digest.update(b"}")
    elif isinstance(tree, tuple | list) and not (tree and all(type(value) is int for value in tree)):
        digest.update(b"[")
        for value in tree:
            _add_to(digest, value)
        digest.update(b"]")
    elif tree is None or isinstance(tree, bool | int | float | str | bytes | tuple | list):
        digest.update(f"{tree!r};".encode())
    else:
        array = np.asarray(_bytes_of(tree) if hasattr(tree, "detach") else tree)
        if array.dtype == object:
            raise TypeError(f"a fingerprint needs arrays, tensors, numbers and strings, got {type(tree).__name__}")
        digest.update(f"{array.dtype}{tuple(tree.shape)}:".encode())
        digest.update(np.ascontiguousarray(array).tobytes())


def _bytes_of(tensor: Any) -> Any:
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    return whole.view(sys.modules["torch"].uint8).numpy()  # numpy has no bfloat16
