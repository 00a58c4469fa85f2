"""What a training function gets: its worker's place among the others, and their common steps."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lp_pipe.collectives.backend import GenerationOver
from lp_pipe.collectives.group import Group
from lp_pipe.collectives.inproc import InprocBackend
from lp_pipe.collectives.part_messages import is_summed_by_servers
from lp_pipe.data_parallel.batch_norm import NormalizesBatches
from lp_pipe.data_parallel.buckets import event_now
from lp_pipe.data_parallel.collective_calls import CollectiveCalls
from lp_pipe.data_parallel.optimizer import ReplicaOptimizer
from lp_pipe.data_parallel.shards import Shard, cut_into_shards, with_placeholders
from lp_pipe.data_parallel.steps import ReplicaSteps
from lp_pipe.data_parallel.workers import ReplicaWorkers
from lp_pipe.errors import DataParallelError, NotSupported
from lp_pipe.pipeline.layers.model import LossWeight
from lp_pipe.private_torch import pytree
from lp_pipe.training.device import empty_on_host
from lp_pipe.training.rng import PausableRng
from lp_pipe.training.state_shards import refuse_fused_on_cpu, refuse_not_elementwise

if TYPE_CHECKING:  # torch's FSDP2 takes a second to import
    from lp_pipe.data_parallel.sharded_model import ShardedModel


class WaitingFuture(Future[Any]):
    """A future of a pytree of tensors.

    Its `result` lets other workers of this process, which it may depend on, go on meanwhile.

    devices: of the tensors that `result` returns; they are there for what is queued on the current stream afterwards.
    """

    def __init__(
        self, waiting: Callable[[], contextlib.AbstractContextManager[None]], devices: Sequence[torch.device]
    ) -> None:
        super().__init__()
        self._waiting = waiting
        self._devices = devices

    def result(self, timeout: float | None = None) -> Any:
        with self._waiting():
            found = super().result(timeout)
        leaves, structure = pytree.tree_flatten(found)
        placed = [leaf.to(device, non_blocking=True) for leaf, device in zip(leaves, self._devices, strict=True)]
        return pytree.tree_unflatten(placed, structure)


class Replica(NormalizesBatches):
    """A worker of `add_replicas`, for the function `train` that runs in it; for one thread.

    Where workers may change (`on_failure`, `workers="2:8"`), collectives are for the loop over `steps` only, and return
    values without meaning in the rest of a step in which workers have changed.
    """

    def __init__(self, workers: ReplicaWorkers) -> None:
        super().__init__(self._run_collective, lambda: self.world_size, lambda: self.rank)
        self._workers = workers
        self.own_steps = ReplicaSteps(workers)
        self._rng: PausableRng | None = None  # of the shard that is being computed
        self._sharded_models: dict[nn.Module, ShardedModel] = {}
        self._shards_by_replica: list[int] | None = None  # of the last batch; None: the loop uses no shards

    # ---- this worker ----

    @property
    def rank(self) -> int:
        return self._workers.membership.rank

    @property
    def world_size(self) -> int:
        """The number of workers, which says nothing of what is learnt."""
        return self._workers.membership.world_size

    @property
    def local_rank(self) -> int:
        """The number of this worker on its host."""
        return self._workers.local_rank

    @property
    def generation(self) -> int:
        """A number that grows with each change of the workers."""
        return self._workers.membership.generation

    @property
    def replicas(self) -> tuple[int, ...]:
        """The logical replicas that this worker hosts now."""
        return tuple(self._workers.replicas)

    @property
    def num_replicas(self) -> int:
        """The number of logical replicas, which decides what is learnt."""
        return self._workers.options.replicas

    @property
    def device(self) -> torch.device:
        return self.logical_device(0)

    def logical_device(self, index: int) -> torch.device:
        """Return device `index` of this worker: one of the GPUs of its `resources`; the CPU without GPUs."""
        devices = self._workers.node.devices
        if not devices:
            return torch.device("cpu")
        if not 0 <= index < len(devices):
            raise DataParallelError(f"logical_device({index}): {self._workers.node.name} has {len(devices)} GPUs")
        return torch.device("cuda", index)

    # ---- training ----

    def steps(self, n: int, save_every: int | None = None, **state: Any) -> Iterator[int]:
        """Return an iterator over the numbers of the steps up to n that are still to be done.

        Between its items steps are committed, workers come and go, and checkpoints are saved to the run's folder. A
        step that was dropped comes again, with the same number; all of `state` is then as before it.

        save_every: save a checkpoint after so many steps; after `--resume` training goes on from the newest.
        state: what a checkpoint keeps and a worker that joins gets: objects with state_dict() and load_state_dict().

        Raises:
            DataParallelError: n or save_every is no count, or an object of `state` has no state.
            Unavailable: the program stops, and steps are left.
        """
        if not isinstance(n, int) or n < 0:
            raise DataParallelError(f"steps takes the number of steps, got n={n!r}")
        if save_every is not None and (not isinstance(save_every, int) or save_every < 1):
            raise DataParallelError(f"save_every must be a whole number of at least 1, or None, got {save_every!r}")
        return self.own_steps.run(n, save_every, state)

    def shards(self, batch: Any, microbatches: int = 1, loss_weight: LossWeight = "samples") -> Iterator[Shard]:
        """Return an iterator over the micro-batches of the hosted replicas, with their weights.

        All workers give the whole batch, (input, target). While a shard is computed, torch's random numbers are those
        of `pp.step_rng(seed, replica, step, microbatch)`.

        loss_weight: "samples", "one", or a function of the target; the weights add up to 1 over the whole batch.

        Raises:
            DataParallelError: the batch cannot be cut into shards.
        """
        if not isinstance(microbatches, int) or microbatches < 1:
            raise DataParallelError(f"microbatches must be a whole number of at least 1, got {microbatches!r}")
        found = cut_into_shards(batch, self.num_replicas, microbatches, loss_weight)
        self._shards_by_replica = [[shard.replica for shard in found].count(r) for r in range(self.num_replicas)]
        hosted = self._workers.replicas
        if self._sharded_models:
            return self._shards(with_placeholders(found, hosted, self._workers.exchange.slots, loss_weight))
        makes = self.own_steps.makes_gradient_of
        return self._shards([shard for shard in found if shard.replica in hosted and makes(shard.replica)])

    @contextlib.contextmanager
    def computing(self, step: int) -> Iterator[None]:
        """Draw the random numbers of this worker's first replica in the body, as `shards` does; collectives may be in
        it."""
        with PausableRng(self._workers.options.seed, self._workers.replicas[0], step, 0) as self._rng:
            try:
                yield
            finally:
                self._rng = None

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        zero: int = 0,
        clip_grad_norm: float | None = None,
        bucket_bytes: int = 4 << 20,
    ) -> ReplicaOptimizer:
        """Return an optimizer whose `step()` sums the gradients of all replicas, commits the step, and updates.

        The parameters and buffers of the model become rank 0's. The sum begins during the last backward.

        zero: 1: each worker has the optimizer's state of a shard of the parameters, and updates that shard. The
            optimizer must treat elements independently, as torch's SGD, Adam, AdamW and RMSprop do, or say so by a
            class attribute `elementwise = True`. All workers must call `state_dict()`. Where workers may change, each
            also has a mirror of another worker's shard: Adam then needs 8 + 16/N bytes per parameter with N workers, so
            two workers save nothing (mirror_every of add_replicas above 1: 8 + 32/N).
        clip_grad_norm: the largest norm of all gradients of this optimizer.
        bucket_bytes: gradients that are summed at a time.

        Raises:
            DataParallelError: parameters of the optimizer are not the model's, or the workers' models differ.
            NotSupported: zero is 2 or 3; or 1, and the optimizer does not treat elements independently, is fused on the
                CPU, or is made inside `steps` where mirror_every is above 1.
        """
        if zero in (2, 3):
            raise NotSupported(f"replica.optimizer(zero={zero}): zero is 0 or 1 here, and 2 and 3 are replica.shard's")
        if zero not in (0, 1):
            raise DataParallelError(f"zero must be 0 or 1, got {zero!r}")
        mirror_every = self._workers.options.mirror_every
        if zero and self._workers.options.may_change and mirror_every > 1 and self.own_steps.state.is_trained:
            raise NotSupported(
                f"replica.optimizer(zero=1) inside `steps`, with add_replicas(mirror_every={mirror_every}): shards are "
                "copied from the first step on; make the optimizer before the loop, or use mirror_every=1"
            )
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, ReplicaOptimizer):
            raise DataParallelError(f"replica.optimizer takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if not isinstance(model, nn.Module):
            raise DataParallelError(f"replica.optimizer takes the model second, got {type(model).__name__}")
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise DataParallelError(f"clip_grad_norm must be above 0, or None, got {clip_grad_norm!r}")
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise DataParallelError(f"bucket_bytes must be a whole number of at least 1, got {bucket_bytes!r}")
        sharded = self._sharded_models.get(model)
        if sharded is not None:
            zero = sharded.zero
        if zero:
            refuse_not_elementwise(optimizer, f"zero={zero}")
            refuse_fused_on_cpu(optimizer, f"zero={zero}")
        if self._workers.options.is_async:
            if zero:
                raise NotSupported(f"zero={zero} with mode='async': the servers have the optimizer's state; use zero=0")
            refuse_not_elementwise(optimizer, "mode='async'")
        made = ReplicaOptimizer(
            optimizer,
            model,
            self._step_optimizer,
            self._gather_state,
            clip_grad_norm,
            bucket_bytes,
            self._workers,
            zero,
            sharded,
        )
        self.own_steps.add_optimizer(made)
        return made

    def shard(self, model: nn.Module, zero: int = 3) -> nn.Module:
        """Shard the parameters of a model over the workers, in place, and return it; for `optimizer`.

        The model is one of torch's FSDP2, over `process_group`. Its parameters become rank 0's. One that was built on
        the meta device is filled module by module, by their reset_parameters() on the CPU, and is then on the worker's
        `device`, so that no process ever has all of it:

            with pp.layer_rng(seed, 0):
                with torch.device("meta"):
                    model = Net()
                model = replica.shard(model)

        Its state_dict() has whole tensors; all workers must call it. Give all micro-batches of a step to one call of
        `shards`, and make one backward for each. A worker without as many as another one gets some of weight 0.

        zero: 3: each worker has a shard of the parameters, gradients and optimizer state; the children of containers
            (Sequential, ModuleList) are gathered one at a time where they are used. 2: what was gathered in a forward
            stays until the backward.

        Raises:
            NotSupported: the workers are threads of one process, or may change.
            DataParallelError: `zero` is another number, the model is on several devices, or a module on the meta device
                has no reset_parameters().
        """
        from lp_pipe.data_parallel import sharded_model

        if zero not in (2, 3):
            raise DataParallelError(
                f"replica.shard: zero must be 2 or 3, got {zero!r}; 0 and 1 are replica.optimizer's"
            )
        if not isinstance(model, nn.Module):
            raise DataParallelError(f"replica.shard takes a model, got {type(model).__name__}")
        if self._workers.options.may_change:
            raise NotSupported(
                f"replica.shard(zero={zero}) where workers may change: a worker that is gone takes its shard with it. "
                "Use on_failure='stop' and a fixed number of workers, or replica.optimizer"
            )
        if self.world_size > 1 and isinstance(self._workers.backend, InprocBackend):
            raise NotSupported(
                f"replica.shard(zero={zero}) with workers that are threads: torch.distributed has one rank in a "
                "process. Launch with mode='process', or use replica.optimizer"
            )
        self._sharded_models[model] = sharded_model.ShardedModel(
            model, zero, self._workers.exchange, self.process_group, self.device
        )
        return model

    def push_pull(self, x: Any, name: str, priority: int = 0) -> "Future[Any]":
        """Begin to sum a pytree of tensors over all workers on the servers; return a future of the sum.

        Workers may call this in any order: the n-th call with a name belongs to the n-th one of the other workers. In a
        step in which workers change the sum has no meaning, as those of other collectives; take it before `.step()`.

        priority: sums with a larger one are sent first.

        Raises:
            NotSupported: there are no servers (backend=dp.Servers(…)).
            DataParallelError: x is no pytree of tensors on the CPU or a GPU.
        """
        leaves, structure = pytree.tree_flatten(x)
        for leaf in leaves:
            is_tensor = isinstance(leaf, Tensor) and leaf.device.type in ("cpu", "cuda")
            if not is_tensor or not is_summed_by_servers(leaf.dtype):
                raise DataParallelError(
                    f"replica.push_pull({name!r}) takes a pytree of tensors on the CPU or a GPU, got {leaf!r}"
                )
        found: Future[Any] = WaitingFuture(self._waiting, [leaf.device for leaf in leaves])
        group = self.own_steps.group_beside_sums()
        if group is None or group.world_size == 1 or not leaves:
            own = [leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in leaves]
            found.set_result(pytree.tree_unflatten(own, structure))
            return found
        if group.push_pull is None:
            raise NotSupported(
                f"replica.push_pull({name!r}) needs servers: use backend=dp.Servers(…), or replica.all_reduce"
            )
        copies = [_host_copy(leaf.detach()) for leaf in leaves]
        totals = [copy for copy, _ in copies]
        left = itertools.count(len(totals) - 1, -1)

        def on_done(error: Exception | None) -> None:
            is_last = next(left) == 0
            if error is not None and not (self._workers.options.may_change and isinstance(error, GenerationOver)):
                with contextlib.suppress(InvalidStateError):  # another leaf has the same error
                    found.set_exception(error)
            elif is_last and not found.done():
                found.set_result(pytree.tree_unflatten(totals, structure))

        for number, (total, copied) in enumerate(copies):
            flat, own_name = total.view(-1), f"push_pull {number} {name}"
            group.push_pull.begin(own_name, [flat], flat, -priority, on_done=on_done, filled=copied)
        return found

    def subgroup(self, ranks: Sequence[int]) -> CollectiveCalls | None:
        """Return the collectives among the workers with these ranks, for these workers to call; None for others.

        They count ranks from 0, in the order of the workers' ranks: `broadcast(x, root=1)` sends the tensors of the
        second. After a change of the workers they are right as long as the same nodes have these ranks.

        Raises:
            DataParallelError: `ranks` is empty, or has a rank that no worker has, or one twice.
        """
        chosen = sorted(ranks)
        if not chosen or chosen != sorted(set(chosen) & set(range(self.world_size))):
            raise DataParallelError(
                f"replica.subgroup({list(ranks)}) takes different ranks from 0 to {self.world_size - 1}"
            )
        if self.rank not in chosen:
            return None
        own = chosen.index(self.rank)
        nodes = [self._workers.membership.members[rank] for rank in chosen]

        def among_chosen(group: Group) -> Group:
            if nodes != [group.membership.members[rank] for rank in chosen if rank < group.world_size]:
                raise DataParallelError(
                    f"the ranks {chosen} of replica.subgroup were {', '.join(nodes)}, and the workers have changed "
                    "since: call it inside the loop over steps"
                )
            return group.subgroup(chosen)

        def run(operation: Callable[[Group], list[Tensor]]) -> list[Tensor] | None:
            return self._run_on(self.own_steps.group_beside_sums, lambda group: operation(among_chosen(group)))

        return CollectiveCalls(run, lambda: len(chosen), lambda: own)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """A torch process group of all workers, the default one of torch.distributed: for DDP, FSDP2, DCP and others.

        Its sums are in the order of the ranks. After a change of the workers it is another one.

        Raises:
            NotSupported: the workers are threads of one process, where torch.distributed has one rank.
        """
        return self._workers.process_group()

    def _shards(self, shards: list[Shard]) -> Iterator[Shard]:
        first = self.own_steps.begin_shards({shard.replica: shard.microbatch + 1 for shard in shards})
        for number, shard in enumerate(shards, start=1):
            if not self.own_steps.has_values:
                return  # the step will be dropped
            is_last = number == len(shards) or shards[number].replica != shard.replica
            self.own_steps.select(shard.replica, is_last=is_last)
            if number == len(shards):
                self.own_steps.open_window()
            seed, microbatch = self._workers.options.seed, first.get(shard.replica, 0) + shard.microbatch
            self._rng = PausableRng(seed, shard.replica, self.own_steps.state.step, microbatch)
            with self.own_steps.times.entering(self._rng):
                try:
                    yield shard
                finally:
                    self._rng = None
        if not shards:
            self.own_steps.open_window()
        self.own_steps.close_window()

    def why_not_normalized(self) -> str:
        if self.world_size != self.num_replicas:
            return f"it needs a worker for each of the {self.num_replicas} replicas, and there are {self.world_size}"
        if self._shards_by_replica is not None and set(self._shards_by_replica) != {1}:
            return f"it needs one shard of each replica, and they have {self._shards_by_replica}"
        return ""

    def _step_optimizer(self, optimizer: ReplicaOptimizer) -> bool:
        with self._waiting():
            return self.own_steps.optimizer_step(optimizer)

    def _gather_state(self, optimizer: ReplicaOptimizer) -> dict[str, Any]:
        with self._waiting():
            return self.own_steps.optimizer_state(optimizer)

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        """Let other workers of this process, whose shards need the random numbers, go on in the body."""
        return self._rng.paused() if self._rng is not None else contextlib.nullcontext()

    def _run_collective(self, operation: Callable[[Group], list[Tensor]]) -> list[Tensor] | None:
        return self._run_on(self.own_steps.group_for_call, operation)

    def _run_on(
        self, find_group: Callable[[], Group | None], operation: Callable[[Group], list[Tensor]]
    ) -> list[Tensor] | None:
        with self.own_steps.times.waiting(), self._waiting():
            try:
                group = find_group()
                if group is not None:
                    return operation(group)
            except GenerationOver as error:
                self.own_steps.generation_is_over(error)
            self.own_steps.warn_of_no_meaning()
            return None


def _host_copy(tensor: Tensor) -> tuple[Tensor, torch.Event | None]:
    """Return a contiguous copy on the host, and the event after which it has the values; None: it has them."""
    if tensor.is_cpu:
        return tensor.clone(memory_format=torch.contiguous_format), None
    return empty_on_host(tensor).copy_(tensor, non_blocking=True), event_now(tensor.device)
