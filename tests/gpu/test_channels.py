"""The contract of channels, for tensors of one GPU in two processes: NCCL, CUDA IPC. `make gpu-check` runs this."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from lp_pipe.channels import ChannelHub, open_sender
from lp_pipe.errors import ChannelClosed
from tests.channels.edges import in_thread, is_blocked
from tests.channels.test_values import tensors_of_every_sort
from tests.gpu.peers import CREDITS, DEVICE, PATIENCE_S, Peer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPT_S = 5.0
LARGE = 4_000_000


@pytest.fixture(scope="module")
def directory() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="lp")
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module", params=["auto", "nccl"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def peer(kind: str, directory: str) -> Iterator[Peer]:
    """A peer that all tests share which leave it as it was."""
    with Peer(kind, directory) as made:
        yield made


def on_gpu(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), value)


def test_auto_is_cuda_ipc_here(directory: str) -> None:
    with Peer("auto", directory) as peer:
        for size in (3, LARGE, *[5] * CREDITS):
            peer.sender.send(0, torch.ones(size, device=DEVICE))
            peer.answer()
        assert type(peer.sender._transport).__name__ == "CudaIpcSender"
        transport: Any = peer.sender._transport
        assert transport._gpu.can_send(), "this peer sees the GPU"
        assert len(transport._gpu._slots) <= CREDITS, "what was opened is used again"


def test_tensors_of_every_dtype_and_shape_stay_on_the_gpu(peer: Peer) -> None:
    sent = on_gpu(tensors_of_every_sort())
    peer.sender.send(0, sent)
    got, where = peer.answer()
    assert where == [DEVICE]
    for name, tensor in sent.items():
        assert got[name].device == tensor.device and got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name
    assert got["channels last"].is_contiguous(memory_format=torch.channels_last)
    assert got["transposed"].stride() == sent["transposed"].stride()


def test_leaves_on_the_host_stay_there(peer: Peer) -> None:
    sent = {"a": torch.randn(300_000), "b": (torch.randn(5, device=DEVICE), 7, None), "c": torch.arange(3)}
    peer.sender.send(0, sent)
    got, where = peer.answer()
    assert where == ["cpu", DEVICE]
    assert got["b"][1:] == (7, None)
    assert got["a"].is_cpu and got["c"].is_cpu and got["b"][0].is_cuda
    assert torch.equal(got["a"], sent["a"]) and torch.equal(got["b"][0], sent["b"][0])  # type: ignore[arg-type, index]


def test_either_part_may_be_empty(peer: Peer) -> None:
    for value in ("no tensor at all", torch.ones(3), torch.zeros(0, 3, device=DEVICE), ()):
        peer.sender.send(0, value)
        got, _ = peer.answer()
        assert str(got) == str(value)


def test_shapes_may_change_and_messages_keep_their_order(peer: Peer) -> None:
    sizes = [1, 100_000, 3, LARGE, 0, 7, 65_536, 2]
    answers = in_thread(lambda: [peer.answer()[0] for _ in sizes])
    for number, size in enumerate(sizes):
        peer.sender.send(0, torch.full((size,), number, device=DEVICE))
    for number, got in enumerate(answers.result(PATIENCE_S)):
        assert got.shape == (sizes[number],) and bool((got == number).all())


def test_the_sender_may_overwrite_at_once_what_it_has_sent(peer: Peer) -> None:
    """Also what a long kernel is still computing when it is sent."""
    for number in range(10):
        x = torch.zeros(LARGE, device=DEVICE)
        torch.cuda._sleep(20_000_000)
        x += number
        peer.sender.send(0, x)
        x.fill_(-1)
        del x
        torch.full((LARGE,), -2.0, device=DEVICE)  # gets the memory that was freed
        got, _ = peer.answer()
        assert bool((got == number).all())


def test_what_was_received_is_the_receivers_own_for_as_long_as_it_likes(peer: Peer) -> None:
    kept = []
    for number in range(3 * CREDITS):
        peer.sender.send(0, torch.full((LARGE,), number, device=DEVICE))
        kept.append(peer.answer()[0])
    for number, got in enumerate(kept):
        assert bool((got == number).all())
        assert got.untyped_storage().nbytes() < 2 * got.nbytes


def test_the_memory_of_messages_is_used_again(peer: Peer) -> None:
    def rounds(count: int) -> int:
        for _ in range(count):
            peer.sender.send(0, torch.ones(LARGE, device=DEVICE))
            peer.answer()
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        return torch.cuda.memory_allocated()

    before = rounds(3 * CREDITS)
    assert rounds(10 * CREDITS) <= before + CREDITS * 4 * LARGE


def test_a_stage_on_the_cpu_gets_tensors_through_the_host(directory: str) -> None:
    with Peer("auto", directory, device="cpu") as peer:
        x = torch.randn(300_000, device=DEVICE)
        peer.sender.send(0, (x, 3))
        (got, three), where = peer.answer()
        assert where == ["cpu"] and three == 3
        assert torch.equal(got, x.cpu())


def test_a_stage_in_the_same_process_gets_copies_on_the_gpu() -> None:
    hub = ChannelHub("inproc:gpu-channels", "stages/1")
    receiver = hub.receiver("activations", device=torch.device(DEVICE))
    sender = open_sender(hub.endpoint, "activations", device=torch.device(DEVICE))
    x = torch.randn(1000, device=DEVICE)
    sender.send(0, x)
    got = receiver.receive(0, PATIENCE_S)
    assert got.is_cuda and got.data_ptr() != x.data_ptr() and torch.equal(got, x)
    hub.close("the test is over")


def test_closing_delivers_what_was_sent_and_then_the_reason(kind: str, directory: str) -> None:
    with Peer(kind, directory) as peer:
        for _ in range(CREDITS):
            peer.sender.send(0, torch.ones(LARGE, device=DEVICE))
        peer.sender.close("enough")
        assert all(bool((peer.answer()[0] == 1).all()) for _ in range(CREDITS))
        assert peer.line().endswith("enough")


def test_a_killed_sender_ends_a_blocked_receive(kind: str, directory: str) -> None:
    with Peer(kind, directory) as peer:
        peer.sender.send(0, torch.ones(LARGE, device=DEVICE))
        peer.answer()
        waiting = in_thread(peer.receiver.receive, 0)
        assert is_blocked(waiting)
        peer.kill()
        began = time.monotonic()
        with pytest.raises(ChannelClosed, match="stages/1"):
            waiting.result(PROMPT_S)
        assert time.monotonic() - began < PROMPT_S
    torch.cuda.synchronize()  # nothing is stuck on the GPU


def test_a_sender_that_is_killed_while_its_gpu_computes_leaves_nothing_stuck(kind: str, directory: str) -> None:
    """No event tells any more that its value is there: a stream that waits for one would wait for ever."""
    with Peer(kind, directory) as peer:
        peer.sender.send(0, torch.ones(LARGE, device=DEVICE))
        peer.answer()
        peer.sender.send(0, "compute")
        waiting = in_thread(peer.receiver.receive, 0)
        assert is_blocked(waiting)
        peer.kill()
        with pytest.raises(ChannelClosed, match="stages/1"):
            waiting.result(PROMPT_S)
    in_thread(torch.cuda.synchronize).result(PROMPT_S)


def test_a_killed_receiver_ends_a_blocked_send(kind: str, directory: str) -> None:
    with Peer(kind, directory) as peer:
        peer.sender.send(0, torch.ones(3, device=DEVICE))
        peer.answer()
        peer.stop()

        def send_too_many() -> None:
            for _ in range(2 * CREDITS):
                peer.sender.send(0, torch.ones(LARGE, device=DEVICE))

        blocked = in_thread(send_too_many)
        assert is_blocked(blocked)
        peer.kill()
        with pytest.raises(ChannelClosed, match="stages/1"):
            blocked.result(PROMPT_S)
    torch.cuda.synchronize()  # what nobody will receive is not stuck on the GPU either


def test_a_killed_receivers_memory_is_the_senders_again(kind: str, directory: str) -> None:
    """torch counts the uses of memory that it has shared, and a killed process does not count down."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with Peer(kind, directory) as peer:
            for _ in range(CREDITS):
                peer.sender.send(0, torch.ones(LARGE, device=DEVICE))
                peer.answer()
            peer.kill()
            with pytest.raises(ChannelClosed):
                while True:
                    peer.sender.send(0, torch.ones(LARGE, device=DEVICE))
    give_up_at = time.monotonic() + PROMPT_S
    while torch.cuda.memory_allocated() > before + LARGE and time.monotonic() < give_up_at:
        time.sleep(0.1)
    assert torch.cuda.memory_allocated() <= before + LARGE


def test_more_channels_than_a_gpu_has_hardware_queues(kind: str, directory: str) -> None:
    """Prints what a channel takes of the GPU's memory in both processes (`ARGS=-s`)."""
    count = 34
    free, _ = torch.cuda.mem_get_info()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer(kind, directory)) for _ in range(count // 2)]  # each has two channels
        for _ in range(2):
            for peer in peers:
                peer.sender.send(0, torch.ones(LARGE, device=DEVICE))
            for peer in peers:
                assert bool((peer.answer()[0] == 1).all())
        used = free - torch.cuda.mem_get_info()[0]
        print(f"{kind}: {used / count / 2**20:.1f} MiB of {DEVICE} per channel, processes' contexts included")


@pytest.mark.parametrize(
    "variables",
    [
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        {"CUDA_LAUNCH_BLOCKING": "1"},
        {"CUDA_MODULE_LOADING": "LAZY"},
        {"NCCL_COMM_BLOCKING": "0"},
        {"NCCL_COMM_BLOCKING": "1"},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    ],
    ids=str,
)
def test_the_contract_holds_under_settings_of_cuda_and_nccl(kind: str, variables: dict[str, str]) -> None:
    """In a process of its own, because they are read once."""
    names = "shapes_may_change or overwrite_at_once or stay_on_the_gpu or killed_while or several_large"
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-x", "-k", f"({names}) and {kind}"]
    if "PYTORCH_CUDA_ALLOC_CONF" in variables:
        command[-1] = f"shapes_may_change and {kind}"
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_that_are_hidden_from_each_other_read_each_others_memory(directory: str) -> None:
    """As with Resources(gpus=1): the receiver opens the memory of a GPU that it does not see on its own."""
    with Peer("auto", directory, env={"CUDA_VISIBLE_DEVICES": "1"}) as peer:
        peer.sender.send(0, torch.ones(LARGE, device=DEVICE))
        assert bool((peer.answer()[0] == 1).all())
        assert peer.sender.keeps_on_gpu


def test_several_large_values_in_both_directions_do_not_wait_for_each_other(kind: str, directory: str) -> None:
    with Peer(kind, directory) as peer:
        for _ in range(15):
            for number in range(CREDITS - 1):
                peer.sender.send(0, torch.full((LARGE,), number, device=DEVICE))
            for number in range(CREDITS - 1):
                assert bool((peer.answer()[0] == number).all())
