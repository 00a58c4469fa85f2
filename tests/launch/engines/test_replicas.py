"""Replicas on two hosts have the fingerprint of the plain loop: hosts in namespaces, with real sshd."""

import json
from pathlib import Path

import pytest

import lp_pipe as lp
from lp_pipe.launch.engines import SshEngine
from tests.data_parallel import tokens
from tests.launch.engines import namespaces

pytestmark = [
    pytest.mark.multihost,
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "there are hosts"),
]

STEPS = 50
WITHIN_S = 180


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_replicas_on_two_hosts_have_the_fingerprint_of_the_plain_loop(
    hosts: namespaces.Hosts, workers: int, tmp_path: Path
) -> None:
    engine = SshEngine(",".join(hosts.names), ssh_config=hosts.ssh_config, python=hosts.python)
    program = tokens.program(STEPS, workers, "auto")
    received = hosts.received_bytes("h2", "eth0")
    with lp.launch(program, "multi_host", engine=engine, run_dir=tmp_path) as run:
        run.wait(WITHIN_S)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = [int(value) for line in lines if (value := json.loads(line)["values"].get("fingerprint"))]
    assert found == [tokens.plain_fingerprint(STEPS)] * workers
    parameters = tokens.VOCABULARY * tokens.WIDTH * 4
    assert hosts.received_bytes("h2", "eth0") - received > STEPS * parameters, "the workers are on both hosts"
