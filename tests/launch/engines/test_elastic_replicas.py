"""Workers on a host that is lost are filled up when the host comes back, to the bits of the plain loop."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import lp_pipe as lp
import lp_pipe.data_parallel as dp
from lp_pipe.launch.engines import SshEngine
from tests.data_parallel.loops import SEED, batch, build, configure, differences, plain_loop
from tests.launch.engines import namespaces
from tests.waiting import until

pytestmark = [
    pytest.mark.multihost,
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "there are hosts"),
]
WITHIN_S = 180
STEPS = 20


@pytest.fixture
def hosts() -> Iterator[namespaces.Hosts]:
    made = namespaces.Hosts(2)
    yield made
    made.close()


def train(replica: dp.Replica, folder: Path, zero: int) -> None:
    """Train; step 4 waits until the host is lost, step 8 until there are four workers again."""
    (folder / f"begun-{lp.context().index}-{os.getpid()}-{time.time()}").touch()
    model = build()
    optimizer = replica.optimizer(torch.optim.Adam(model.parameters(), 0.01), model, zero, clip_grad_norm=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    for step in replica.steps(STEPS, model=model, optimizer=optimizer, scheduler=scheduler):
        configure(step, model)
        if step == 4 and replica.world_size == 4:
            (folder / "reached").touch()
            until((folder / "lost").exists)
        if step == 8 and replica.world_size < 4:
            until(lambda: len(list(folder.glob("begun-[23]-*"))) == 4, WITHIN_S)
        if step > 8 and replica.world_size < 4:
            time.sleep(0.3)  # they meet in a moment
        for shard in replica.shards(batch(step)):
            (F.cross_entropy(model(shard.input), shard.target) * shard.weight).backward()
        optimizer.step()
        scheduler.step()
        with (folder / f"sizes-{lp.context().index}").open("a") as sizes:
            sizes.write(f"{step} {replica.world_size}\n")
    torch.save((model.state_dict(), optimizer.state_dict()), folder / f"rank{replica.rank}.pt")


@pytest.mark.parametrize(("how", "zero", "mirror_every"), [("agent", 1, 1), ("agent", 1, 3), ("cut", 0, 1)])
def test_workers_of_a_lost_host_start_there_again_once_it_is_back(
    hosts: namespaces.Hosts, how: str, zero: int, mirror_every: int, shared: Path
) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 4, "workers": "2:4", "on_failure": "shrink", "seed": SEED}
    dp.add_replicas(program, train, shared, zero, mirror_every=mirror_every, **options)
    engine = SshEngine(",".join(hosts.names), ssh_config=hosts.ssh_config, python=hosts.python)
    with lp.launch(program, "multi_host", engine=engine, run_dir=shared / "run") as run:
        until((shared / "reached").exists, WITHIN_S)
        if how == "cut":
            hosts.cut(hosts.names[1])
        else:
            for pid in hosts.pids(hosts.names[1]):
                os.kill(pid, signal.SIGKILL)
        until(lambda: run.status()["replicas"][3]["state"] == "failed", WITHIN_S)
        (shared / "lost").touch()
        if how == "cut":
            hosts.mend(hosts.names[1])
        run.wait(WITHIN_S)
    assert differences(shared, *plain_loop(STEPS, 4)) == []
    assert len(list(shared.glob("rank*.pt"))) == 4
    sizes = dict(map(int, line.split()) for line in (shared / "sizes-0").read_text().splitlines())
    assert sizes[2] == 4 and sizes[5] == 2 and sizes[STEPS - 1] == 4
