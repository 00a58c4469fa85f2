"""Replicas on a GPU that divide or offload their state train to the bits of the plain loop. `make gpu-check` runs this.

Two workers share one GPU. Loops with offload are compared with one whose update is on the CPU.
"""

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_flatten_with_path

import lp_pipe as lp
import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp
from tests.data_parallel.loops import SEED, differences, plain_loop, train
from tests.data_parallel.test_failures import STEPS as DYING_STEPS
from tests.data_parallel.test_failures import dying
from tests.gpu.peers import DEVICE
from tests.pipeline.plain_loop import (
    PlainLoop,
    adam,
    assert_same_state,
    launched,
    random_batches,
    squared_error,
    without_batch_norm,
)
from tests.pipeline.test_zero import BATCHES, check_steps_and_checkpoint

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("deterministic"),
]

STEPS = 6
WITHIN_S = 55

# ---- loops of data parallelism ----


def run_replicas(mode: str, folder: Path, steps: int = STEPS, microbatches: int = 2, **options: Any) -> None:
    program = lp.Program("replicas")
    given = {"replicas": 4, "seed": SEED, "device": DEVICE, **options}
    dp.add_replicas(program, train, str(folder), steps, microbatches, **given)
    lp.launch(program, mode=mode, run_dir=folder / "run").wait(WITHIN_S)


@pytest.mark.parametrize(
    ("mode", "backend", "workers", "clip"),
    [
        ("thread", "inproc", 2, None),
        ("thread", "direct", 3, 0.5),
        ("process", "shm", 2, None),
        ("process", "direct", 2, None),
    ],
)
def test_workers_have_shards_of_the_optimizers_state(
    mode: str, backend: str, workers: int, clip: float | None, tmp_path: Path
) -> None:
    run_replicas(mode, tmp_path, workers=workers, backend=backend, zero=1, clip=clip)
    assert differences(tmp_path, *plain_loop(STEPS, 4, 2, clip, device=DEVICE)) == []


@pytest.mark.parametrize(
    ("zero", "workers", "backend", "clip"), [(2, 2, "shm", None), (3, 2, "shm", 0.5), (3, 2, "direct", None)]
)
def test_workers_have_shards_of_parameters_and_gradients(
    zero: int, workers: int, backend: str, clip: float | None, tmp_path: Path
) -> None:
    run_replicas("process", tmp_path, workers=workers, backend=backend, zero=zero, clip=clip)
    assert differences(tmp_path, *plain_loop(STEPS, 4, 2, clip, device=DEVICE)) == []


def test_a_model_on_the_meta_device_is_filled_on_the_workers_gpu(tmp_path: Path) -> None:
    resources = lp.Resources(gpus=1)
    run_replicas("process", tmp_path, replicas=2, workers=1, zero=3, is_meta=True, resources=resources)
    assert differences(tmp_path, *plain_loop(STEPS, 2, 2, device=DEVICE)) == []


def shards_half(replica: dp.Replica) -> None:
    replica.shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(DEVICE)))


def test_a_model_on_two_devices_is_refused(tmp_path: Path) -> None:
    program = lp.Program("replicas")
    dp.add_replicas(program, shards_half, replicas=1)
    with pytest.raises(lp.NodeError, match="cpu, cuda:0") as failed:
        lp.launch(program, mode="thread", run_dir=tmp_path / "run").wait(WITHIN_S)
    assert failed.value.type_name == "DataParallelError"


def test_training_is_resumed_by_other_workers_with_another_zero(tmp_path: Path) -> None:
    for workers, steps, zero in [(2, 2, 0), (3, 4, 1), (1, STEPS, 0)]:
        run_replicas("thread", tmp_path, steps, workers=workers, zero=zero, save_every=2)
        found = differences(tmp_path, *plain_loop(steps, 4, 2, device=DEVICE))
        assert found == [], f"after step {steps}, with zero={zero} on {workers} workers"
        for file in tmp_path.glob("rank*.pt"):
            file.unlink()


def test_what_a_kernel_reads_of_the_state_stays_on_the_gpu(tmp_path: Path) -> None:
    """The counts of steps of a fused Adam, in updates, checkpoints and the whole state."""
    for workers, steps in [(2, 2), (3, STEPS)]:
        run_replicas("thread", tmp_path, steps, workers=workers, zero=1, fused=True, save_every=2)
        assert differences(tmp_path, *plain_loop(steps, 4, 2, device=DEVICE, fused=True)) == []


@pytest.mark.parametrize(
    ("on_failure", "place", "deaths", "mirror_every"),
    [
        ("shrink", "exchange", {"replicas/0": 4, "replicas/3": 9}, 1),
        ("restart", "shard", {"replicas/1": 5}, 1),
        ("restart", "shard", {"replicas/1": 5}, 3),
    ],
)
def test_dead_workers_lose_no_shard(
    on_failure: str, place: str, deaths: dict[str, int], mirror_every: int, tmp_path: Path
) -> None:
    program = lp.Program("replicas")
    options = {"replicas": 5, "workers": 4, "seed": SEED, "on_failure": on_failure, "mirror_every": mirror_every}
    dp.add_replicas(program, dying, str(tmp_path), deaths, place, zero=1, device=DEVICE, **options)
    lp.launch(program, mode="thread", run_dir=tmp_path / "run").wait(WITHIN_S)
    assert differences(tmp_path, *plain_loop(DYING_STEPS, 5, device=DEVICE)) == []


def reduces(replica: dp.Replica, folder: str) -> None:
    """Call torch.distributed with tensors of a GPU; write what came out."""
    group = replica.process_group
    own = torch.arange(4.0, device=DEVICE) + 10 * replica.rank
    total, parts = own.clone(), torch.empty(8, device=DEVICE)
    dist.all_reduce(total, group=group)
    dist.all_gather_into_tensor(parts, own, group=group)
    torch.save((total, parts), Path(folder) / f"rank{replica.rank}.pt")


def test_a_process_group_takes_tensors_of_a_gpu(tmp_path: Path) -> None:
    program = lp.Program("group")
    dp.add_replicas(program, reduces, str(tmp_path), replicas=2, backend="shm")
    lp.launch(program, mode="process", run_dir=tmp_path / "run").wait(WITHIN_S)
    first, second = torch.arange(4.0, device=DEVICE), torch.arange(4.0, device=DEVICE) + 10
    for rank in range(2):
        total, parts = torch.load(tmp_path / f"rank{rank}.pt")
        assert torch.equal(total, first + second), f"rank {rank} has {total}"
        assert torch.equal(parts, torch.cat([first, second])), f"rank {rank} has {parts}"


# ---- pipelines ----


class OptimizerOnHost:
    """An optimizer of copies in the host's memory, which gets gradients from a GPU and puts parameters there."""

    def __init__(self, model: pp.Model, named: list[tuple[str, nn.Parameter]]) -> None:
        self._copies = {parameter: nn.Parameter(parameter.detach().cpu().clone()) for _, parameter in named}
        self.inner = model.optimizer([(name, self._copies[parameter]) for name, parameter in named])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self._copies)}]

    def zero_grad(self) -> None:
        for parameter in self._copies:
            parameter.grad = None

    def step(self) -> None:
        for parameter, copy in self._copies.items():
            copy.grad = None if parameter.grad is None else parameter.grad.cpu()
        self.inner.step()
        with torch.no_grad():
            for parameter, copy in self._copies.items():
                parameter.copy_(copy)


class UpdatesOnHost(PlainLoop):
    """The plain loop on a GPU, with the optimizer on the CPU."""

    def __init__(self, model: pp.Model, *arguments: Any, **options: Any) -> None:
        super().__init__(model, *arguments, **options)
        on_host: Any = OptimizerOnHost(model, list(self.module.named_parameters()))
        self.optimizer = on_host
        self.lr_scheduler = model.lr_scheduler(on_host.inner) if model.lr_scheduler else None


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("thread", {"zero": 1, "stages": [4], "replicas": (2, 1), "clip_grad_norm": 0.1}),
        ("thread", {"zero": 2, "stages": [], "replicas": (3,), "clip_grad_norm": 0.1}),
        ("thread", {"zero": 3, "stages": [], "replicas": (2,), "recompute": ("every", 3)}),
        ("thread", {"zero": 3, "stages": [], "replicas": (2,), "precision": "bf16"}),
        ("process", {"zero": 1, "stages": [], "replicas": (2,)}),
        ("process", {"zero": 3, "stages": [], "replicas": (2,), "clip_grad_norm": 0.1}),
    ],
)
def test_replicas_of_a_stage_divide_their_state(mode: str, options: dict[str, Any], tmp_path: Path) -> None:
    check_steps_and_checkpoint(mode, tmp_path, DEVICE, **options)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("thread", {"zero": 0, "stages": [4], "replicas": (1, 2), "clip_grad_norm": 0.1}),
        ("thread", {"zero": 1, "stages": [], "replicas": (2,)}),
        ("thread", {"zero": 3, "stages": [], "replicas": (2,), "precision": "bf16"}),
        ("thread", {"zero": 0, "stages": [], "replicas": (1,), "precision": "fp16", "clip_grad_norm": 0.1}),
        ("process", {"zero": 2, "stages": [], "replicas": (2,), "clip_grad_norm": 0.1}),
    ],
)
def test_stages_update_on_the_host(mode: str, options: dict[str, Any], tmp_path: Path) -> None:
    check_steps_and_checkpoint(mode, tmp_path, DEVICE, UpdatesOnHost, offload="cpu", **options)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, the optimizer's state among them."""
    dcp_to_torch_save(folder, folder / "whole.pt")
    leaves, _ = tree_flatten_with_path(torch.load(folder / "whole.pt", weights_only=False))
    return {str(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def test_a_checkpoint_is_loaded_with_and_without_offload(tmp_path: Path) -> None:
    model = without_batch_norm()
    ways: list[dict[str, Any]] = [
        {"offload": "cpu", "replicas": 2, "zero": 1},
        {"replicas": 2, "zero": 3},
        {"offload": "cpu"},
        {"device": "cpu"},
    ]
    for number, options in enumerate(ways):
        given = {"stages": 1, "microbatches": 2, "device": DEVICE, **options}
        with launched("thread", model, BATCHES, **given) as pipeline:
            if number:
                pipeline.load(tmp_path / str(number - 1))
                pipeline.save(tmp_path / "loaded")
                found, saved = (tensors_in(tmp_path / name) for name in ("loaded", str(number - 1)))
                assert_same_state(found, saved)
                assert len([name for name in found if "exp_avg" in name]) > 4
            pipeline.step(BATCHES[number])
            pipeline.save(tmp_path / str(number))


def double_by_data(modules: dict[str, nn.Module]) -> None:
    for module in modules.values():
        for parameter in module.parameters():
            parameter.data.mul_(2)


def test_what_a_function_writes_to_parameters_reaches_the_hosts_copies() -> None:
    model = pp.Model([nn.Linear(8, 8), nn.Linear(8, 8)], squared_error, adam)
    plain = UpdatesOnHost(model, 2, device=DEVICE)
    batches = random_batches([4, 4], 8)
    with launched("thread", model, batches, stages=1, microbatches=2, device=DEVICE, offload="cpu") as pipeline:
        pipeline.step()
        pipeline.apply(double_by_data)
        pipeline.step()
        found = pipeline.state_dict()
    plain.step(batches[0])
    on_host: Any = plain.optimizer
    for parameter, copy in on_host._copies.items():
        parameter.data.mul_(2)
        copy.data.mul_(2)
    plain.step(batches[1])
    assert_same_state(found, plain.state_dict())


WIDTH = 6144
SMALL_BYTES = 100 << 20  # each thread may have workspaces of cuBLAS, of 32 MiB


def gpu_bytes() -> int:
    gc.collect()
    return torch.cuda.memory_allocated()


def gpu_bytes_after_steps(**options: Any) -> int:
    """Return the bytes that a pipeline has on the GPU between two steps."""
    deadline = time.monotonic() + WITHIN_S
    while (before := gpu_bytes()) > SMALL_BYTES:  # of tests before, whose threads are about to end
        assert time.monotonic() < deadline, f"{before} bytes are left of other tests"
        time.sleep(0.05)
    model = pp.Model([pp.Layer(nn.Linear, WIDTH, WIDTH) for _ in range(2)], squared_error, adam)
    batches: list[tuple[Tensor, Tensor]] = random_batches([4, 4], WIDTH)
    given = {"stages": 1, "microbatches": 2, "device": DEVICE, **options}
    with launched("thread", model, batches, **given) as pipeline:
        for _ in batches:
            pipeline.step()
        pipeline.fingerprint()  # what the worker still holds of the last step's messages is gone
        return gpu_bytes() - before


@pytest.mark.parametrize(("zero", "bytes_per_parameter"), [(1, 16), (2, 20), (3, 16)])
def test_two_replicas_have_their_shards_in_the_gpus_memory(zero: int, bytes_per_parameter: int) -> None:
    """Between steps there are parameters, Adam's 8 bytes, and with 2 and 3 room for the gradients of the shards."""
    found = gpu_bytes_after_steps(replicas=2, zero=zero) / (2 * (WIDTH * WIDTH + WIDTH))
    undivided = 2 * 12
    assert 0.9 * bytes_per_parameter < found < bytes_per_parameter + 2.5 < undivided, f"{found} bytes per parameter"


def test_offload_leaves_the_optimizers_state_out_of_the_gpus_memory() -> None:
    usual, offloaded = gpu_bytes_after_steps(), gpu_bytes_after_steps(offload="cpu")
    parameters = 2 * 4 * (WIDTH * WIDTH + WIDTH)
    told = f"{usual} bytes, {offloaded} with offload, of parameters {parameters}"
    # Each thread may have workspaces of cuBLAS, of 32 MiB.
    assert offloaded < 1.6 * parameters and usual - offloaded > 1.5 * parameters, told
