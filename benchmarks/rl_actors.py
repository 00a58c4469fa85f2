"""Measure how environment steps a second grow with the actors, where an environment sleeps.

    python -m benchmarks.rl_actors [--repeats 3] [--steps 400] [--sleep-ms 5] [--order rounds free]
        [--quick] [--json FILE]

Each actor is a process with one environment whose step sleeps; the policy and the learner do next to nothing. The rate
is that of the counter, from the first of its changes to the last. gymnasium's AsyncVectorEnv with 8 environments steps
beside it, without agent, replay and learner. The parties take turns.

Then the learner sleeps as long as the actors do in a round: rounds with lag 0 (act, then learn), with lag 1 (both at
the same time), and free order, which waits for nothing. The bar is the wall clock of lag 1 over that of free order.
"""

import argparse
import pathlib
import sys
import tempfile
import time
from contextlib import redirect_stdout
from typing import Any

import gymnasium
import numpy as np

import lp_pipe as lp
import lp_pipe.rl as rl
from benchmarks.report import machine, show_table, spread, write_json

ACTORS = (1, 2, 4, 8)
BARS = {2: 1.9, 4: 3.8, 8: 7.2}
ROUND = 32  # steps of an actor
FREE_BAR = 1.1


class Sleeping(gymnasium.Env[Any, Any]):
    """Each step sleeps; an episode has 50 steps."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, sleep_s: float) -> None:
        self._sleep_s = sleep_s

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._time = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._sleep_s)
        self._time += 1
        return np.zeros(4, np.float32), 0.0, self._time == 50, False, {}


class Nothing:
    """A network without weights, and its learner, whose step sleeps."""

    def __init__(self, sleep_s: float) -> None:
        self._sleep_s = sleep_s

    def step(self, sample: rl.Sample) -> rl.Update:
        time.sleep(self._sleep_s)
        return rl.Update()

    def variables(self) -> Any:
        return {}

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        pass


class NothingBuilder:
    """An agent that does nothing. learn_s: the time of a learner step, of which there is one for `batch_size` items."""

    def __init__(self, batch_size: int = 64, learn_s: float = 0.0) -> None:
        self.batch_size, self._learn_s = batch_size, learn_s

    def make_network(self, spec: rl.Spec) -> Nothing:
        return Nothing(self._learn_s)

    def make_replay_table(self, spec: rl.Spec) -> rl.Table:
        return rl.Table(10_000, rl.Uniform(), rate_limiter=rl.SampleToInsertRatio(1.0, 64, 1_000.0))

    def make_adder(self, spec: rl.Spec) -> Any:
        return rl.NStepAdder(1, 0.99)

    def make_policy(self, network: Nothing, spec: rl.Spec, evaluation: bool) -> Any:
        return lambda observations, state, generator, counts: (np.zeros(len(observations), np.int64), state, None)

    def make_learner(self, network: Nothing, spec: rl.Spec, generator: np.random.Generator) -> Any:
        return network


def rate_of_actors(actors: int, steps: int, sleep_s: float, order: Any, builder: rl.Builder) -> float:
    """Return environment steps a second of all actors together."""
    experiment = rl.ExperimentConfig(
        builder,
        lambda seed: Sleeping(sleep_s),
        max_num_actor_steps=actors * steps,
        evaluation=rl.Evaluation(every=10**9, episodes=1),
        order=order,
    )
    program = rl.make_distributed_experiment(experiment, num_actors=actors)
    seen: list[tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        run = lp.launch(program, "process", run_dir=folder)
        with run:
            counter = run.client("counter")
            while not seen or seen[-1][1] < actors * steps:
                count = counter.get().get("env_steps", 0)
                if count > (seen[-1][1] if seen else 0):
                    seen.append((time.perf_counter(), count))
                time.sleep(0.005)
            run.wait()
    (begin, first), (end, last) = seen[0], seen[-1]
    return (last - first) / (end - begin)


def rate_of_vector(steps: int, sleep_s: float) -> float:
    """Return environment steps a second of gymnasium's eight processes."""
    environments = gymnasium.vector.AsyncVectorEnv([lambda: Sleeping(sleep_s)] * 8)
    try:
        environments.reset(seed=0)
        actions = np.zeros(8, np.int64)
        environments.step(actions)
        start = time.perf_counter()
        for _ in range(steps):
            environments.step(actions)
        return 8 * steps / (time.perf_counter() - start)
    finally:
        environments.close()


def rates_of_orders(steps: int, sleep_s: float) -> dict[str, float]:
    """Return environment steps a second of two actors, where acting and learning take equally long, by order."""
    batches = 4  # in a round
    builder = NothingBuilder(2 * ROUND // batches, ROUND * sleep_s / batches)
    orders = {"lag 0": rl.Rounds(ROUND, lag=0), "lag 1": rl.Rounds(ROUND, lag=1), "free": rl.Free()}
    return {name: rate_of_actors(2, 2 * steps, sleep_s, order, builder) for name, order in orders.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="of each actor")
    parser.add_argument("--sleep-ms", type=float, default=5.0)
    parser.add_argument("--order", nargs="+", choices=["rounds", "free"], default=["rounds"])
    parser.add_argument("--quick", action="store_true", help="once, with a quarter of the steps")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    repeats, steps = (1, arguments.steps // 4) if arguments.quick else (arguments.repeats, arguments.steps)
    sleep_s = arguments.sleep_ms / 1000.0
    orders = {"rounds": rl.Rounds(ROUND, lag=1), "free": rl.Free()}
    rates: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name in arguments.order:
            for actors in ACTORS:
                found = rate_of_actors(actors, steps, sleep_s, orders[name], NothingBuilder())
                rates.setdefault(f"{name}, {actors} actors", []).append(found)
        rates.setdefault("AsyncVectorEnv(8)", []).append(rate_of_vector(steps, sleep_s))
        for name, rate in rates_of_orders(steps, sleep_s).items():
            rates.setdefault(f"equally long, {name}", []).append(rate)
    spreads = {name: spread(values) for name, values in rates.items()}
    vector = spreads["AsyncVectorEnv(8)"]["median"]
    rows = [["AsyncVectorEnv(8)", f"{vector:,.0f}", "", "", "1.00 ×"]]
    for name in arguments.order:
        one = spreads[f"{name}, 1 actors"]["median"]
        for actors in ACTORS:
            rate = spreads[f"{name}, {actors} actors"]["median"]
            times = [f"{rate / one:.2f} ×", f"≥ {BARS[actors]}" if actors in BARS else "", f"{rate / vector:.2f} ×"]
            rows.append([f"{name}, {actors} actors", f"{rate:,.0f}", *times])
    title = f"Environment steps a second, where a step sleeps {arguments.sleep_ms:g} ms"
    show_table(title, ["party", "steps/s", "of one actor", "bar", "of AsyncVectorEnv"], rows)
    free = spreads["equally long, free"]["median"]
    rows = []
    for name in ("lag 0", "lag 1", "free"):
        rate = spreads[f"equally long, {name}"]["median"]
        rows.append([name, f"{rate:,.0f}", f"{free / rate:.2f} ×", f"≤ {FREE_BAR}" if name == "lag 1" else ""])
    show_table("Acting and learning equally long, two actors", ["order", "steps/s", "wall of free", "bar"], rows)
    write_json({"benchmark": "rl_actors", "machine": machine(), "steps_per_s": spreads}, arguments.json)


if __name__ == "__main__":
    main()
