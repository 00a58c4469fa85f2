"""Every kind of channel: a pipeline trains to the same bits over each of them."""

import gc
from pathlib import Path

import pytest
import torch

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.channels import kinds
from lp_pipe.errors import PipelineError
from tests.pipeline.plain_loop import (
    PlainLoop,
    assert_same_state,
    launched,
    launched_many,
    model_with_everything,
    random_batches,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([10, 3, 12])


OPTIONS = {"stages": 3, "microbatches": 4, "clip_grad_norm": 0.1}


def assert_trains_like_the_plain_loop(pipeline: pp.PipelineClient) -> None:
    plain = PlainLoop(model_with_everything(), 4, 0.1)
    assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
    assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.parametrize("kind", ["auto", "inproc", "shm", "grpc", "gloo"])
def test_every_kind_of_channel_trains_to_the_same_bits(kind: str) -> None:
    with launched("thread", model_with_everything(), BATCHES, channel=kind, **OPTIONS) as pipeline:
        assert_trains_like_the_plain_loop(pipeline)


@pytest.mark.skipif(not kinds.is_shm_supported(), reason="no memfd_create")
def test_stages_that_join_their_neighbours_again_give_the_old_channels_memory_back(tmp_path: Path) -> None:
    """Regression: the memory was freed when Python's collector came by, which counts three objects, not gigabytes."""
    with launched("thread", model_with_everything(), BATCHES, channel="shm", **OPTIONS) as pipeline:
        held = []
        pipeline.save(str(tmp_path / "saved"))
        gc.disable()
        try:
            for _ in range(6):
                pipeline.step(BATCHES[0])
                held.append(Path("/proc/self/maps").read_text().count("lp_pipe-channel"))
                pipeline.recover()
                pipeline.load(str(tmp_path / "saved"))
        finally:
            gc.enable()
    assert max(held) < 4 * held[0]  # what a thread is about to leave goes the next time


def test_every_kind_of_channel_between_processes_trains_to_the_same_bits() -> None:
    """The tests of exactness train with "auto"."""
    pipelines = [(model_with_everything(), BATCHES, {"channel": kind, **OPTIONS}) for kind in ("grpc", "gloo")]
    with launched_many("process", pipelines) as clients:
        for client in clients:
            assert_trains_like_the_plain_loop(client)


def test_a_kind_that_does_not_exist_is_refused_at_setup() -> None:
    with pytest.raises(PipelineError, match=r"channel='pigeon': .*auto, inproc, shm, tls, grpc, gloo, nccl"):
        pp.add_pipeline(lp.Program("train"), model_with_everything(), channel="pigeon")


@pytest.mark.parametrize("device", ["cpu", ["cuda:0", "cpu"]])
def test_nccl_to_a_stage_on_the_cpu_is_refused_at_setup(device: str | list[str]) -> None:
    with pytest.raises(PipelineError, match=r"channel='nccl' with device=.*: NCCL carries tensors of GPUs only: use"):
        pp.add_pipeline(lp.Program("train"), model_with_everything(), stages=2, channel="nccl", device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_on_a_host_without_a_gpu_fails_the_start() -> None:
    """With device="auto" the launcher cannot know that there is no GPU."""
    with (
        pytest.raises(Exception, match=r"channel kind 'nccl' joins two GPUs, and this end is on the CPU"),
        launched("thread", model_with_everything(), BATCHES, stages=2, microbatches=2, channel="nccl") as pipeline,
    ):
        list(pipeline.steps())


def test_a_kind_that_does_not_fit_the_mode_fails_the_start() -> None:
    with (
        pytest.raises(Exception, match=r"channel kind 'inproc' does not fit unix:.*use one of 'auto', 'shm'"),
        launched("process", model_with_everything(), BATCHES, stages=2, microbatches=2, channel="inproc") as pipeline,
    ):
        list(pipeline.steps())
