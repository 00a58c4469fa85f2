"""A pipeline with checkpoints over two hosts whose network is slow, lossy or cut: it goes on, or is resumed.

Either way it ends with the bits of an undisturbed run.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.checkpoint import Checkpoints, checkpoints_in
from lp_pipe.launch.engines import SshEngine
from tests.launch.engines import namespaces
from tests.waiting import until

pytestmark = [
    pytest.mark.multihost,
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "there are hosts"),
]

STEPS, EVERY = 24, 4
WITHIN_S = 90.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[namespaces.Hosts]:
    made = namespaces.Hosts(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def wire(hosts: namespaces.Hosts) -> namespaces.Wire:
    """Yield the wire to the second host, which has the second stage; the trainer is on the first."""
    return hosts.wire("h2")


@pytest.fixture
def run_dir(hosts: namespaces.Hosts, wire: namespaces.Wire) -> Iterator[Path]:
    """Return a folder on a disk that all hosts share (each has a /tmp of its own)."""
    wire.tell("carry both", "delay 0", "loss 0")
    folder = Path(tempfile.mkdtemp(prefix="lp-network-", dir="/var/tmp"))
    yield folder
    wire.tell("carry both", "delay 0", "loss 0")
    # Of a host that was cut off, too: its nodes end by themselves.
    until(lambda: not any(hosts.pids(name) for name in hosts.names), within_s=30)
    shutil.rmtree(folder)


class Feeder:
    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def program(run_dir: Path, pause_s: float) -> lp.Program:
    """Return a program whose trainer writes its step into one file, and at the end the fingerprint into another."""

    def train(pipeline: pp.PipelineClient) -> None:
        checkpoints = Checkpoints({"pipeline": pipeline})
        checkpoints.restore()
        for result in pipeline.steps(STEPS - pipeline.current_step()):
            (run_dir / "step").write_text(str(result.step))
            if (result.step + 1) % EVERY == 0:
                checkpoints.save(result.step + 1, wait=False)
            time.sleep(pause_s)  # so that faults meet it on its way
        checkpoints.wait_until_written()
        (run_dir / "fingerprint").write_text(pipeline.fingerprint())
        lp.stop()

    layers = [pp.Layer(torch.nn.Linear, 16, 32), pp.Layer(torch.nn.Dropout, 0.5), pp.Layer(torch.nn.Linear, 32, 4)]
    model = pp.Model(layers, torch.nn.functional.mse_loss, torch.optim.Adam)
    made = lp.Program("over_a_bad_network")
    feeder = made.add_node(lp.CourierNode(Feeder), label="feeder")
    pipeline = pp.add_pipeline(made, model, stages=2, microbatches=2, inputs=feeder)
    made.add_node(lp.PyNode(train, pipeline), label="trainer")
    return made


def launched(hosts: namespaces.Hosts, run_dir: Path, pause_s: float = 0.1) -> lp.Run:
    engine = SshEngine(",".join(hosts.names), ssh_config=hosts.ssh_config, python=hosts.python)
    return lp.launch(program(run_dir, pause_s), "multi_host", engine=engine, run_dir=run_dir)


def step_of(run_dir: Path) -> int:
    path = run_dir / "step"
    return int(path.read_text() or 0) if path.exists() else -1


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    lp.launch(program(folder, 0.0), "thread", run_dir=folder).wait(WITHIN_S)
    return (folder / "fingerprint").read_text()


@pytest.mark.parametrize("fault", ["delay 0.2", "loss 0.05"])
def test_over_a_slow_or_lossy_network_training_goes_on(
    fault: str, hosts: namespaces.Hosts, wire: namespaces.Wire, run_dir: Path, undisturbed: str
) -> None:
    wire.tell(fault)  # from the beginning: the hosts join over it, too
    launched(hosts, run_dir).wait(WITHIN_S)
    assert wire.tell("carry both") > 20
    assert (run_dir / "fingerprint").read_text() == undisturbed
    assert len(checkpoints_in(run_dir / "checkpoints")) == 3


@pytest.mark.parametrize("carries", ["none", "in", "out"])
def test_a_network_that_is_cut_for_two_seconds_delays_training(
    carries: str, hosts: namespaces.Hosts, wire: namespaces.Wire, run_dir: Path, undisturbed: str
) -> None:
    run = launched(hosts, run_dir)
    until(lambda: step_of(run_dir) >= 6)
    wire.tell(f"carry {carries}")
    time.sleep(2.0)  # the length of the fault
    reached = step_of(run_dir)
    assert wire.tell("carry both") > 0
    assert reached < STEPS - 1, "it was done before the fault"
    run.wait(WITHIN_S)
    assert (run_dir / "fingerprint").read_text() == undisturbed


@pytest.mark.parametrize("carries", ["none", "in", "out"])
def test_a_network_that_stays_cut_ends_the_run_by_name_and_it_is_resumed(
    carries: str, hosts: namespaces.Hosts, wire: namespaces.Wire, run_dir: Path, undisturbed: str
) -> None:
    """none: both ways; in, out: the host hears others who do not hear it, or the other way round."""
    run = launched(hosts, run_dir)
    until(lambda: step_of(run_dir) >= 9)
    wire.tell(f"carry {carries}")
    cut = time.monotonic()
    with pytest.raises(lp.NodeError, match="HostLost: host 'h2' is lost"):
        run.wait(WITHIN_S)
    assert time.monotonic() - cut < 25
    assert checkpoints_in(run_dir / "checkpoints")
    assert wire.tell("carry both") > 0
    launched(hosts, run_dir).wait(WITHIN_S)
    assert (run_dir / "fingerprint").read_text() == undisturbed
