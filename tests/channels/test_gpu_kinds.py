"""The channels that GPUs get, and the error where there can be none. No GPU is needed; tests/gpu has what needs one."""

import os
import threading
from typing import Any

import pytest
import torch

from lp_pipe.channels import ChannelHub, kinds, libnccl, nccl, open_sender, registry
from lp_pipe.channels.base import TransferError
from lp_pipe.channels.stream import StreamSender
from lp_pipe.errors import ChannelClosed

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.skipif(not kinds.is_shm_supported(), reason="no memfd_create")
@pytest.mark.parametrize("kind", ["auto", "shm"])
def test_shared_memory_leaves_tensors_on_gpus_where_they_are(kind: str) -> None:
    assert kinds.choose(kind, "unix:/tmp/s", is_on_gpu=True).name == "cuda_ipc"
    assert kinds.choose(kind, "unix:/tmp/s", is_on_gpu=False).name == "shm"


def test_neither_threads_nor_hosts_get_cuda_ipc() -> None:
    assert kinds.choose("auto", "inproc:hub", is_on_gpu=True).name == "inproc"
    assert kinds.choose("auto", "grpcs:h1:1", is_on_gpu=True).name == "grpc"


def test_nccl_is_plain_so_nobody_gets_it_without_asking() -> None:
    assert not kinds.named("nccl").is_encrypted
    for endpoint in ("inproc:hub", "unix:/tmp/s", "grpcs:h1:1"):
        assert kinds.choose("auto", endpoint, is_on_gpu=True).name != "nccl"
        assert kinds.choose("nccl", endpoint).name == "nccl"


def test_an_end_on_the_cpu_cannot_have_nccl(directory: str) -> None:
    hub = ChannelHub(f"unix:{directory}/s", "stages/1")
    hub.receiver("activations")
    with pytest.raises(ValueError, match=r"'nccl' joins two GPUs, and this end is on the CPU: use device='cuda'"):
        open_sender(hub.endpoint, "activations", kind="nccl")
    hub.close("the test is over")


@without_gpu
def test_nccl_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'nccl' needs a GPU, and torch sees none here: use channel='auto'"):
        nccl.NcclBackend(GPU)


def test_nccl_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(libnccl, "LIBRARY", "libnccl-that-is-not-there.so.2")
    libnccl._library.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"needs NCCL: libnccl-that-is-not-there\.so\.2: .*'auto'"):
            nccl.check(GPU)
    finally:
        libnccl._library.cache_clear()


def test_a_receiver_on_the_cpu_refuses_a_sender_with_nccl(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._OF_GPUS, "nccl", (lambda device: StreamSender(), nccl.NcclReceiver))
    hub = ChannelHub(f"unix:{directory}/s", "stages/1")
    receiver = hub.receiver("activations")
    sender = open_sender(hub.endpoint, "activations", kind="nccl")
    with pytest.raises(
        ChannelClosed, match=r"stages/1: channel kind 'nccl' joins two GPUs, and this end is on the CPU"
    ):
        sender.send(0, torch.ones(1))
    with pytest.raises(ChannelClosed, match="this end is on the CPU"):
        receiver.receive(0, 10)
    hub.close("the test is over")


def test_an_abort_frees_who_waits_even_where_nccl_itself_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """ncclCommAbort may wait for the other end, which is dead."""
    is_in_abort, may_return = threading.Event(), threading.Event()

    def hang(handle: object) -> None:
        is_in_abort.set()
        may_return.wait(10)

    monkeypatch.setattr(libnccl, "abort", hang)
    monkeypatch.setattr(libnccl, "failure", lambda handle: None)
    stream: Any = None
    communicator = nccl.Communicator("handle", GPU, stream, lambda: None)
    assert communicator._failure() is None
    communicator.abort("the sender is gone")
    communicator.abort("the channel is closed")
    assert is_in_abort.wait(10)
    assert communicator._failure() == "the sender is gone"
    with pytest.raises(RuntimeError, match="the sender is gone"):
        communicator.send([torch.empty(1)], 1, 0)
    may_return.set()


def test_an_end_that_two_threads_close_at_once_is_freed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second ncclCommAbort would be of memory that the first has freed."""
    freed: list[object] = []
    monkeypatch.setattr(libnccl, "abort", freed.append)
    stream: Any = None
    communicator = nccl.Communicator("handle", GPU, stream, lambda: None)
    with communicator._lock:  # both have come as far as they can
        for reason in ("the sender is gone", "the channel is closed"):
            communicator._ended = None  # as the other one saw it
            communicator.abort(reason)
    for thread in threading.enumerate():
        if thread.name == "abort nccl":
            thread.join(10)
    assert freed == ["handle"]


OLD, NEW = (2, 27, 5), (2, 30, 3)  # versions of NCCL
SHARED, ELSEWHERE = ("GPU-1 100", "GPU-1 101"), ("GPU-1 100", "GPU-2 101")


def test_two_processes_on_one_gpu_pass_for_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL before 2.30 refuses two ranks on one GPU of one host."""
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert nccl.HostIds().choose(*ELSEWHERE, OLD) == "", "two GPUs of one host need not go by the network"
    assert nccl.HostIds().choose(*SHARED, NEW) == ""
    assert "NCCL_HOSTID" not in os.environ
    own = nccl.HostIds().choose(*SHARED, OLD)
    assert own == os.environ.pop("NCCL_HOSTID")
    monkeypatch.setenv("NCCL_HOSTID", "the user's own")
    assert nccl.HostIds().choose(*SHARED, OLD) == "the user's own" != own


def test_a_host_id_that_was_inherited_tells_nobody_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that uses NCCL itself starts two others: both would pass for its host, and NCCL refuses them."""
    monkeypatch.setenv("NCCL_HOSTID", f"lp_pipe-{os.getppid()}-0123456789abcdef")
    host_ids = nccl.HostIds()
    own = host_ids.choose(*SHARED, OLD)
    assert own.startswith(f"lp_pipe-{os.getpid()}-")
    assert host_ids.choose(*SHARED, OLD) == own, "NCCL has read it by now"


def test_a_host_id_that_nccl_has_read_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    host_ids = nccl.HostIds()
    assert host_ids.choose(*ELSEWHERE, OLD) == host_ids.choose(*SHARED, OLD) == ""
    with pytest.raises(TransferError, match=r"GPU-1.*2\.27\.5.*NCCL_HOSTID"):
        nccl.check_hosts(*SHARED, b"", b"", OLD)
    nccl.check_hosts(*SHARED, b"", b"lp_pipe-101-5", OLD)
    nccl.check_hosts(*SHARED, b"", b"", NEW)
    nccl.check_hosts(*ELSEWHERE, b"", b"", OLD)


def test_two_threads_on_one_gpu_cannot_have_nccl() -> None:
    with pytest.raises(TransferError, match="'auto'"):
        nccl.HostIds().choose("GPU-1 100", "GPU-1 100", NEW)
