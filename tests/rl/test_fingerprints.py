"""An experiment in rounds has one fingerprint: in one process, in threads, in processes and on two hosts."""

from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
import lp_pipe.rl as rl
from tests.rl.short_experiments import TORCH_AGENTS, make_experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WITHIN_S = 280.0  # twelve processes that load torch, on a busy machine


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("actors", [1, 2, 4])
@pytest.mark.parametrize("agent", ["bandit", *TORCH_AGENTS])
def test_an_agent_has_one_fingerprint_however_it_is_distributed(
    agent: str, actors: int, lag: int, no_leaks: None, tmp_path: Path
) -> None:
    experiment = make_experiment(agent, rl.Rounds(steps=16, lag=lag))
    expected = rl.run_experiment(experiment, actors)
    assert expected.counts["env_steps"] == experiment.max_num_actor_steps and expected.counts["learner_steps"] > 0
    modes: dict[str, dict[str, Any]] = {"thread": {}, "process": {}, "multi_host": {"hosts": "2"}}
    for mode, options in modes.items():
        program = rl.make_distributed_experiment(experiment, actors)
        with lp.launch(program, mode, run_dir=tmp_path / mode, **options) as run:
            run.wait(WITHIN_S)
        found = rl.load(tmp_path / mode)
        assert (found.counts, found.curve) == (expected.counts, expected.curve)
        assert found.fingerprint == expected.fingerprint, mode
