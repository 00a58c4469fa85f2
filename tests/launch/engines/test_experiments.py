"""Agents trained on two hosts have the fingerprint of one process: hosts in namespaces, with real sshd."""

import dataclasses
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
import lp_pipe.rl as rl
from lp_pipe.launch.engines import SshEngine
from tests.launch.engines import namespaces
from tests.rl.short_experiments import make_experiment

pytestmark = [
    pytest.mark.multihost,
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "there are hosts"),
]

WITHIN_S = 280.0
ACTORS = 2


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("agent", ["bandit", "dqn", "impala"])
def test_an_agent_on_two_hosts_has_the_fingerprint_of_one_process(
    hosts: namespaces.Hosts, agent: str, lag: int, shared: Path
) -> None:
    experiment = make_experiment(agent, rl.Rounds(steps=16, lag=lag))
    expected = rl.run_experiment(experiment, ACTORS).fingerprint
    make: Callable[[int], Any] = experiment.environment_factory  # not a name

    def make_and_say_where(seed: int) -> Any:
        (shared / socket.gethostname()).touch()
        return make(seed)

    experiment = dataclasses.replace(experiment, environment_factory=make_and_say_where)
    engine = SshEngine(",".join(hosts.names), ssh_config=hosts.ssh_config, python=hosts.python)
    program = rl.make_distributed_experiment(experiment, ACTORS)
    with lp.launch(program, "multi_host", engine=engine, run_dir=shared / "run") as run:
        run.wait(WITHIN_S)
    assert rl.load(shared / "run").fingerprint == expected
    assert {path.name for path in shared.iterdir()} >= set(hosts.names), "there are environments on both hosts"
