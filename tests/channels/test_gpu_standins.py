"""NCCL and CUDA IPC run whole in two processes without a GPU, on stand-ins for libnccl, torch.cuda and CUDA's IPC."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lp_pipe.channels import kinds
from tests.gpu_standins import processes, scenarios
from tests.gpu_standins.processes import FakeProcess

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.skipif(not kinds.is_shm_supported(), reason="no memfd_create"),
]

Start = Callable[..., FakeProcess]
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
LAUNCH_BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
PLAIN: dict[str, str] = {}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The stand-in for libnccl.so.2, compiled, and the server that forks the stages' processes."""
    source = Path(scenarios.__file__).with_name("fake_nccl.c")
    made = tmp_path_factory.mktemp("standins") / "libnccl.so.2"
    command = ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", "-o", str(made), str(source), "-lrt"]
    subprocess.run(command, check=True)
    processes.preload()
    yield str(made)
    processes.stop_server()


@pytest.fixture(params=["nccl", "auto"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(library: str, directory: str) -> Iterator[Start]:
    """Start a stage's process; `gpu` is the name of its only GPU."""
    started = []

    def make(
        name: str, scenario: processes.Scenario, kind: str, gpu: str = "GPU-0", env: dict[str, str] = PLAIN
    ) -> FakeProcess:
        started.append(FakeProcess(scenario, name, gpu, directory, kind, library, env=env))
        return started[-1]

    yield make
    for process in started:
        process.kill()


def run_pair(start: Start, kind: str, scenario: processes.Scenario, env: dict[str, str]) -> list[Any]:
    """Run a scenario in two stages; neither ends before both are done."""
    pair = [start(name, scenario, kind, env=env) for name in "ab"]
    for process in pair:
        assert process.hear() == "done"
    for process in pair:
        process.say("end")
    return [process.result() for process in pair]


def exchange(start: Start, kind: str, env: dict[str, str]) -> Any:
    """Return the ways that the values took: whether the GPU's transport carried them."""
    start("b", scenarios.echo, kind, env=env)
    return start("a", scenarios.exchange, kind, env=env).result()


def test_values_arrive_whole_also_those_that_are_still_being_computed(start: Start, kind: str) -> None:
    assert exchange(start, kind, PLAIN) == [True]


@pytest.mark.parametrize("is_blocking", ["0", "1"])
def test_nccl_may_be_told_whether_its_calls_block(start: Start, is_blocking: str) -> None:
    assert exchange(start, "nccl", {"NCCL_COMM_BLOCKING": is_blocking}) == [True]


@pytest.mark.parametrize(("kind", "env"), [("auto", PLAIN), ("nccl", ONE_QUEUE), ("nccl", LAUNCH_BLOCKING)], ids=str)
def test_stages_that_send_several_large_values_to_each_other_do_not_wait_for_each_other(
    start: Start, kind: str, env: Any
) -> None:
    """A send must not occupy a hardware queue before the receive that it needs can run."""
    assert run_pair(start, kind, scenarios.burst, env) == ["done", "done"]


def test_more_channels_than_hardware_queues(start: Start, kind: str) -> None:
    assert run_pair(start, kind, scenarios.many_channels, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}) == ["wrong: []"] * 2


def test_a_sender_that_is_killed_while_its_gpu_computes_leaves_nothing_stuck(start: Start, kind: str) -> None:
    sender = start("b", scenarios.slow_producer, kind)
    receiver = start("a", scenarios.wait_for_killed, kind)
    assert (sender.hear(), receiver.hear()) == ("sent", "waiting")
    sender.kill()
    found = receiver.result()
    assert "from b" in found["raised"]
    assert found["left"] == [] and found["took_s"] < scenarios.PROMPT_S


def test_a_killed_receivers_memory_is_the_senders_again(start: Start, kind: str) -> None:
    receiver = start("b", scenarios.echo, kind)
    sender = start("a", scenarios.send_to_killed, kind)
    assert sender.hear() == [True]
    receiver.kill()
    found = sender.result()
    assert "to b" in found["raised"]
    assert found["left"] == [] and found["uses"] == 0


def test_a_peer_that_dies_while_it_connects_holds_no_thread(start: Start) -> None:
    """A blocking ncclCommInitRank waits for the other rank for ever."""
    receiver = start("a", scenarios.wait_for_connection, "nccl")
    sender = start("b", scenarios.die_while_connecting, "nccl")
    assert (receiver.hear(), sender.hear()) == ("waiting", "in init")
    sender.kill()
    found = receiver.result()
    assert "from b" in found["raised"]
    assert found["left"] == []


def run_ring(start: Start, version: str) -> list[str]:
    env = {"FAKE_NCCL_VERSION": version}
    gpus = {"a": "GPU-0", "b": "GPU-1", "c": "GPU-0"}
    stages = [start(name, scenarios.ring, "nccl", gpu=gpu, env=env) for name, gpu in gpus.items()]
    for stage in stages:
        assert stage.hear() == "done"
    for stage in stages:
        stage.say("end")
    return [word for stage in stages for word in stage.result()]


def test_a_ring_of_stages_may_share_a_gpu(start: Start) -> None:
    assert run_ring(start, "23003") == ["[1.5, 1.5]"] * 3


def test_a_ring_that_shares_a_gpu_is_refused_where_nccl_has_read_its_host_id(start: Start) -> None:
    """NCCL 2.23 to 2.29 reads NCCL_HOSTID once: it is too late when the second communicator finds a shared GPU."""
    told = run_ring(start, "22705")
    assert told.count("[1.5, 1.5]") == 2
    refused = [word for word in told if word != "[1.5, 1.5]"]
    assert len(refused) == 2
    assert all("NCCL_HOSTID" in word and "2.27.5" in word and "GPU-0" in word for word in refused)


@pytest.mark.parametrize("obstacle", ["refused", "garbage"])
def test_the_host_carries_what_the_receiver_cannot_open(start: Start, obstacle: str) -> None:
    """As with MIG, WSL2, expandable segments: opening fails, or gives other memory."""
    assert exchange(start, "auto", {"FAKE_IPC": obstacle}) == [False]


def test_the_host_carries_a_message_for_which_the_gpu_has_no_memory(start: Start) -> None:
    receiver = start("b", scenarios.receive_sizes, "auto")
    start("a", scenarios.send_sizes, "auto", env={"FAKE_FREE_BYTES": "100000"}).result()
    assert receiver.result() == [2.0 * size for size in scenarios.SIZES]


def test_gpus_of_which_each_process_sees_its_own_only_read_each_others_memory(start: Start) -> None:
    start("b", scenarios.echo, "auto", gpu="GPU-1")
    assert start("a", scenarios.exchange, "auto", gpu="GPU-0").result() == [True]


def test_doctor_sees_which_way_tensors_take(start: Start, kind: str) -> None:
    start("b", scenarios.doctors_peer, kind)
    assert start("a", scenarios.doctor, kind).result() is True
