"""The optimizer that a training loop steps: it sums the gradients of all replicas before the user's optimizer runs."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lp_pipe.data_parallel.buckets import GradientBuckets
from lp_pipe.data_parallel.exchange import Exchange
from lp_pipe.data_parallel.gradient_sums import GradientSums
from lp_pipe.data_parallel.late_updates import LateSum, LateUpdates
from lp_pipe.data_parallel.served_buckets import ServedBuckets
from lp_pipe.data_parallel.shard_copies import ShardCopies
from lp_pipe.data_parallel.shard_moves import STATE, HeldShards, OfElements, announced, are_shards_lost, dealt_states
from lp_pipe.data_parallel.workers import ReplicaWorkers
from lp_pipe.errors import DataParallelError, NotSupported
from lp_pipe.training.optimizer_state import OfParameter, on_device_of
from lp_pipe.training.state_shards import OwnShard, OwnShardState, StateShards, flat, is_dense, is_elementwise, joined
from lp_pipe.training.tensor_parts import Box, TensorPart, as_part, boxes_of_range, memory_order

if TYPE_CHECKING:  # torch's FSDP2 takes a second to import
    from lp_pipe.data_parallel.sharded_model import ShardedModel


class ReplicaOptimizer(torch.optim.Optimizer):
    """An optimizer that wraps the user's, with the same groups and the same state; torch's LR schedulers take it."""

    # The base's __init__ is not called: groups, state and hooks are those of the wrapped optimizer.
    def __init__(
        self,
        inner: torch.optim.Optimizer,
        model: nn.Module,
        sum_and_apply: Callable[["ReplicaOptimizer"], bool],
        gather_state: Callable[["ReplicaOptimizer"], dict[str, Any]],
        clip_grad_norm: float | None,
        bucket_bytes: int,
        workers: ReplicaWorkers,
        zero: int = 0,
        sharded_model: "ShardedModel | None" = None,
    ) -> None:
        """zero: 1: each worker has the optimizer's state of a shard of the parameters, and updates that shard. Where
            workers may change it also updates the shard of another worker, which thus is not lost with that worker.

        sharded_model: the model's, if its parameters are sharded.

        Raises:
            DataParallelError: the optimizer's parameters are not the model's.
        """
        self.inner = inner
        self._sum_and_apply = sum_and_apply
        self._gather_state = gather_state
        self.model = model
        self._clip_grad_norm = clip_grad_norm
        self._bucket_bytes = bucket_bytes
        self._workers = workers
        self.sharded_model = sharded_model
        self.is_sharded = zero > 0 or sharded_model is not None
        self.moves_shards = zero == 1 and workers.options.may_change
        self.has_mirrors = self.moves_shards and workers.options.mirror_every == 1  # which each step updates
        self.copies = ShardCopies() if self.moves_shards and not self.has_mirrors else None
        self._goes_back_to: HeldShards | None = None  # copies, from which the next deal is
        self._shards: StateShards | None = None  # made with the first buckets, which decide which shards they are
        self._held_before: dict[nn.Parameter, Sequence[OwnShardState]] = {}  # until all workers have what is dealt
        self._lacks_updates = False  # whether parameters are updated here only in this worker's shards
        self._whole: dict[str, Any] | None = None  # the state of all workers, in the body of `whole_state`
        self._buckets: GradientSums | None = None
        self._exchange: Exchange | None = None
        self._extra_flags: Callable[[], list[float]] = list
        self._layout: list[str] = []
        self._undo: Callable[[], None] | None = None
        self._late_sums: list[LateSum] | None = None  # of the step that is about to be applied
        self.late = LateUpdates(inner, model)  # of the last step, where sums come after it
        self.named_parameters()  # refuses strange ones

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is being copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"ReplicaOptimizer({self.inner!r})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # the wrapped optimizer's
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state by parameter; where it is sharded, that of this worker's shards."""
        self.late.finish()
        if self._shards is None:
            return self.inner.state
        return {parameter: dict(state.values) for parameter, state in self._shards.states().items()}

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state; where it is sharded, all workers must call this."""
        self.late.finish()
        if self._shards is None:
            return self.inner.state_dict()
        return self._gather_state(self) if self._whole is None else self._whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.late.finish()
        if self._shards is None:
            self.inner.load_state_dict(state_dict)
            return
        self.inner.load_state_dict({**state_dict, "state": {}})
        states = state_dict["state"]
        self._shards.take_whole(
            {parameter: states[index] for index, parameter in enumerate(self._parameters()) if index in states}
        )

    def state_parts(self) -> dict[Tensor, dict[str, Any]]:
        """Return the state that this worker has, by parameter, not copied: values, or TensorParts of them."""
        self.late.finish()
        if self._shards is None:
            return {parameter: dict(values) for parameter, values in self.inner.state.items()}
        return {parameter: state.parts(parameter) for parameter, state in self._shards.states().items()}

    def own_boxes(self, parameter: nn.Parameter) -> tuple[Box, ...] | None:
        """Return the boxes of the parameter whose state this worker has; None: all of it."""
        if self._shards is not None:
            begin, end = self._shards.range_of(parameter)
            return boxes_of_range(tuple(parameter.shape), begin, end, memory_order(parameter))
        part = as_part(parameter)
        return part.boxes if isinstance(part, TensorPart) else None

    def load_parts(self, saved: Mapping[nn.Parameter, OfParameter]) -> None:
        """Go on from state and options that were saved: values, or TensorParts with `own_boxes`."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in saved:
                    group.update(saved[parameter].options)
        if self._shards is not None:  # mirrors are dealt after this
            self._shards.set_states({one: _flattened(one, state) for one, (state, _) in saved.items()})
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in saved:
                    state = {key: _whole_or_sharded(parameter, value) for key, value in saved[parameter].state.items()}
                    self.inner.state[parameter] = on_device_of(parameter, state, group)

    @contextlib.contextmanager
    def whole_state(self, *, keeps: bool) -> Iterator[None]:
        """Let workers call `state_dict` in the body, which all workers enter. keeps: whether this one does."""
        if self._shards is not None:
            self._whole = self.gathered_state(keeps=keeps)
        try:
            yield
        finally:
            self._whole = None

    def gathered_state(self, *, keeps: bool) -> dict[str, Any]:
        """Return the state of all workers' shards; all workers call this. keeps: whether this worker needs it."""
        states = gathered_states(self._workers, self._parameters(), self._own_states(), keeps=keeps)
        grouped = [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        placed = [on_device_of(one, state, group) for (group, one), state in zip(grouped, states, strict=True)]
        return {**self.inner.state_dict(), "state": {index: state for index, state in enumerate(placed) if state}}

    def _own_states(self) -> Mapping[nn.Parameter, OwnShardState]:
        return {} if self._shards is None else self._shards.states()

    def _parameters(self) -> list[nn.Parameter]:
        """Return the parameters in the order of the groups, which is that of a state_dict."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)
        self.named_parameters()

    def step(self, closure: Any = None) -> bool:  # type: ignore[override]  # torch's returns the closure's loss
        """Sum the gradients of all replicas, commit the step and update; False: the step was dropped and comes again.

        Raises:
            DataParallelError: there is a closure, or the workers have not all done the same.
            CollectiveMismatch: another worker makes another call.
        """
        if closure is not None:
            raise DataParallelError("optimizer.step(closure) of replicas: compute the loss in the loop over shards")
        return self._sum_and_apply(self)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the optimizer's parameters by their names in the model, in the model's order.

        Raises:
            DataParallelError: one is not the model's.
        """
        own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        with self.late.unnoticed():
            named = [(name, parameter) for name, parameter in self.model.named_parameters() if id(parameter) in own]
        if len(named) != len(own):
            strange = own - {id(parameter) for _, parameter in named}
            shapes = [
                list(parameter.shape)
                for group in self.param_groups
                for parameter in group["params"]
                if id(parameter) in strange
            ]
            raise DataParallelError(
                f"{len(shapes)} of the {len(own)} parameters of {type(self.inner).__name__} are not the model's "
                f"(shapes {', '.join(map(str, shapes[:5]))}): give the model that the optimizer was made for"
            )
        return named

    def signature(self) -> list[tuple[str, list[int], str]]:
        """Return names, shapes and dtypes of the parameters and buffers, which must be the same on all workers."""
        named: list[tuple[str, Tensor]] = [*self.named_parameters(), *self.model.named_buffers()]
        return [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in named]

    @property
    def buckets(self) -> GradientSums:
        assert self._buckets is not None, "begin_step makes them"
        return self._buckets

    def begin_step(self, exchange: Exchange, extra_flags: Callable[[], list[float]]) -> None:
        """Begin a step among these workers."""
        self._undo = None
        self.make_buckets(exchange, extra_flags)
        self.buckets.begin_step()

    def make_buckets(self, exchange: Exchange, extra_flags: Callable[[], list[float]]) -> None:
        """Decide how gradients are summed among these workers, and which state this one has."""
        if self._buckets is None or exchange != self._exchange:
            self._exchange, self._extra_flags = exchange, extra_flags
            self._begin_layout(self._trained())

    def follow_freezing(self) -> None:
        """Make other buckets if parameters were frozen or thawed since; gradients of this step stay."""
        trained = self._trained()
        if [name for name, _ in trained] != self._layout:
            gradients = [(parameter, parameter.grad) for _, parameter in trained]
            self._begin_layout(trained)
            self.buckets.begin_step()
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _begin_layout(self, trained: list[tuple[str, nn.Parameter]]) -> None:
        """Make buckets of these parameters, and get the state of the shards that this worker has then."""
        if not self.is_sharded or self.sharded_model is not None:
            self._make_buckets(trained)
        elif self._shards is not None:
            assert self._exchange is not None
            self._deal(self._exchange, self._extra_flags, trained, has_state=True)
        else:
            self._make_buckets(trained)
            self._shards = StateShards(self.inner, *self._new_shards())

    def drain(self) -> None:
        """Sum all gradients before another collective, if some may be summed already."""
        if self._buckets is not None:
            self._buckets.drain()

    def finish_sums(self, *, may_be_late: bool) -> bool:
        """Sum what is left; return whether that is done.

        may_be_late: if possible begin the sums, and wait only until all workers have; then parameters are updated one
            by one, as their sums come.
        """
        self.late.finish()
        buckets = self.buckets
        is_late = may_be_late and self._can_be_late and isinstance(buckets, ServedBuckets)
        if is_late and isinstance(buckets, ServedBuckets):
            self._late_sums = buckets.finish_late()
        else:
            buckets.finish()
        return not is_late

    @property
    def _can_be_late(self) -> bool:
        """Whether each parameter can be updated by itself, in time for the next read."""
        push_pull = self._exchange.push_pull if self._exchange is not None else None
        is_asked_for = push_pull is not None and push_pull.has_priority
        is_single = self._clip_grad_norm is None and not self.is_sharded and is_elementwise(self.inner)
        return is_asked_for and is_single and self.late.are_possible()

    def clip(self) -> None:
        """Scale the gradients down to the largest norm that was asked for."""
        if self._clip_grad_norm is not None:
            nn.utils.clip_grad_norm_([parameter for _, parameter in self.named_parameters()], self._clip_grad_norm)

    def apply(self, *, keeps_undo: bool) -> None:
        """Clip the summed gradients and step the wrapped optimizer. keeps_undo: `undo` may be called later."""
        late, self._late_sums = self._late_sums, None
        if late is not None:
            self.late.begin(late)
            return
        if keeps_undo:
            self._undo = self.undoing()
        if self._clip_grad_norm is not None:
            self.buckets.clip(self._clip_grad_norm)
        if self._shards is None:
            self.inner.step()
        else:
            rank = self._mirrored_rank if self.has_mirrors else None
            of_mirrors = {} if rank is None else self.buckets.shard_gradients(rank)
            self._shards.step(self.buckets.shard_gradients(), of_mirrors)
            self._lacks_updates = self.has_mirrors and not self._updates_all
        self.clear_gradients()

    def exchange_updates(self) -> None:
        """Get the parameters that other workers have updated, where the optimizer's state is sharded."""
        if self.is_sharded:
            if not self._updates_all:
                self.buckets.share_updates()
            self._lacks_updates = False

    @property
    def _updates_all(self) -> bool:
        """Whether this worker's shards and mirrors are the whole parameters."""
        return self.has_mirrors and self._exchange is not None and len(self._exchange.counts) <= 2

    @property
    def _mirrored_rank(self) -> int | None:
        """The rank of the worker whose shards this one mirrors, or copies."""
        return self._workers.mirrored_rank if self.moves_shards else None

    def undo(self) -> None:
        """Take back an update of this step."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def clear_gradients(self) -> None:
        """Leave the gradients of all parameters None."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        if self._buckets is not None:
            self._buckets.close()
            self._buckets = None

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]

    def _check_parameters(self, parameters: list[tuple[str, nn.Parameter]]) -> None:
        for name, parameter in parameters:
            if self.is_sharded and self.sharded_model is None and not is_dense(parameter):
                raise NotSupported(f"parameter {name!r} is a view with gaps in its memory: use zero=0")

    def _make_buckets(self, trained: list[tuple[str, nn.Parameter]]) -> None:
        self.late.finish()
        self.close()
        self._check_parameters(trained)
        assert self._exchange is not None
        self._layout = [name for name, _ in trained]
        if self.sharded_model is not None:
            self._buckets = self.sharded_model.gradients(trained, self._exchange, self._extra_flags)
            if self._shards is None:
                self._shards = StateShards(self.inner, self._buckets.own_shards(self._parameters()))
            return
        # The norm for clipping is of whole gradients: its bits depend on the order in which torch adds up.
        has_whole_sums = not self.is_sharded or self._clip_grad_norm is not None or self.has_mirrors
        given = trained, self._exchange, self._bucket_bytes, self._extra_flags
        if self._exchange.push_pull is not None:
            self._buckets = ServedBuckets(*given, self.late.is_late)
        else:
            self._buckets = GradientBuckets(*given, is_sharded=not has_whole_sums)

    def _new_shards(self) -> list[dict[nn.Parameter, OwnShard]]:
        """Return the shards that lie in this worker's parts of the buckets, and those that it mirrors."""
        parameters, mirrored = self._parameters(), self._mirrored_rank
        mirrors = {} if mirrored is None else self.buckets.own_shards(parameters, mirrored)
        return [self.buckets.own_shards(parameters), mirrors]

    # ---- shards that move ----

    def go_back(self, step: int) -> None:
        """Give shards the values that were copied at a step; the next deal makes them complete."""
        assert self.copies is not None, "there are copies"
        self._goes_back_to = self.copies.put_back(step, self._parameters())

    def deal(self, exchange: Exchange, extra_flags: Callable[[], list[float]], *, has_state: bool, step: int) -> bool:
        """Give each of these workers the shards that it needs now; all call this. False: some are lost.

        Parameters are then complete, too. If shards are lost, all are left without state.

        has_state: whether this worker has trained, or has the state of one that has.
        step: of the state that is dealt, for copies of shards.

        Raises:
            GenerationOver: a worker is gone; what this worker has is not lost by that.
        """
        return self._deal(exchange, extra_flags, None, has_state=has_state, copied_step=step)

    def _deal(
        self,
        exchange: Exchange,
        extra_flags: Callable[[], list[float]],
        trained: list[tuple[str, nn.Parameter]] | None,
        *,
        has_state: bool,
        copied_step: int | None = None,
    ) -> bool:
        """trained: the parameters in buckets from now on; None: those of the first worker that has state.

        copied_step: the step for which shards are copied, where they are; None: for none.
        """
        parameters = self._parameters()
        own = self._held(parameters) if has_state else HeldShards(None, [[] for _ in parameters], lacks_updates=False)
        told = self._workers.gathered(
            HeldShards(own.layout, [[*map(announced, shards)] for shards in own.by_parameter], own.lacks_updates)
        )
        if trained is None:
            layout = next(one.layout for one in told if one.layout is not None)
            trained = [(name, parameter) for name, parameter in self.named_parameters() if name in layout]
        is_same = exchange == self._exchange and [name for name, _ in trained] == self._layout
        self._exchange, self._extra_flags = exchange, extra_flags
        if self._buckets is None or not is_same:
            self._make_buckets(trained)
        shards, mirrors = self._new_shards()
        if self._shards is None:
            self._shards = StateShards(self.inner, {})
        if are_shards_lost(parameters, told):
            self._shards.set_shards(shards, mirrors)
            self._held_before, self._lacks_updates, self._goes_back_to = {}, False, None
            if self.copies is not None:
                self.copies.forget()
            return False
        needed = [shards, mirrors] if mirrors else [shards]
        states = dealt_states(self._workers, parameters, told, own, needed)
        before = dict(zip(parameters, own.by_parameter, strict=True))
        if self.copies is not None:
            if copied_step is not None:
                self.copies.take(copied_step, self._layout, needed, states)
            mirrors = {}
        self._shards.set_shards(shards, mirrors)
        self._shards.set_states(states[0], states[1] if mirrors else {})
        self._lacks_updates, self._goes_back_to = False, None
        if self.has_mirrors:
            # A worker may be gone before another one has got all: then what this worker had may still be needed.
            self._held_before = before
            self._workers.backend.barrier(call=STATE)
            self._held_before = {}
        return True

    def _held(self, parameters: Sequence[nn.Parameter]) -> HeldShards:
        """Return what this worker has, or goes back to."""
        if self._goes_back_to is not None:
            return self._goes_back_to
        if self._shards is None:
            self._check_parameters(self.named_parameters())
            self._shards = StateShards(self.inner, {one: OwnShard(flat(one), 0) for one in parameters})
            self._layout = self._layout or [name for name, _ in self._trained()]
        held = self._shards.held()
        by_parameter = [[*held.get(one, []), *self._held_before.get(one, [])] for one in parameters]
        return HeldShards(self._layout, by_parameter, self._lacks_updates)

    def undoing(self) -> Callable[[], None]:
        """Return a function that brings present state and parameters back."""
        state = copy.deepcopy(self.inner.state_dict())
        undo_shards = self._shards.undoing() if self._shards is not None else None
        weights = [(parameter, parameter.detach().clone()) for _, parameter in self.named_parameters()]

        def undo() -> None:
            self.inner.load_state_dict(state)
            if undo_shards is not None:
                undo_shards()
                self._lacks_updates = False
            with torch.no_grad():
                for parameter, weight in weights:
                    parameter.copy_(weight)

        return undo


def _whole_or_sharded(parameter: nn.Parameter, value: Any) -> Any:
    """Return a value that was read, as a DTensor if the parameter is one."""
    if not isinstance(value, TensorPart):
        return value
    sharded: Any = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    if value.values:
        sharded.to_local().copy_(value.values[0])
    return sharded


def _flattened(parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
    order = memory_order(parameter)
    return {key: value.flat(order) if isinstance(value, TensorPart) else value for key, value in state.items()}


def gathered_states(
    workers: ReplicaWorkers,
    parameters: Sequence[nn.Parameter],
    own: Mapping[nn.Parameter, OwnShardState],
    *,
    keeps: bool,
) -> list[dict[str, Any]]:
    """Return the optimizer's state of each whole parameter, from the shards of all workers, which all call this.

    keeps: whether this worker needs it; others get the small values only, and keep no more than one tensor at a time.
    """
    told: list[list[OwnShardState | None]] = workers.gathered(
        [announced(own[parameter]) if parameter in own else None for parameter in parameters]
    )
    found = []
    for index, parameter in enumerate(parameters):
        parts = [of_worker[index] for of_worker in told]
        names = sorted({name for part in parts if part is not None for name in part.values})
        whole: list[OwnShardState] = []
        for name in names:
            if not any(part is not None and isinstance(part.values.get(name), OfElements) for part in parts):
                whole += [OwnShardState(part.begin, part.end, {name: part.values[name]}) for part in parts if part]
                continue
            gathered = _gathered(workers, name, parts, own.get(parameter), parameter.device)
            whole += gathered if keeps else []
        found.append(joined(parameter, whole))
    return found


def _gathered(
    workers: ReplicaWorkers,
    name: str,
    parts: Sequence[OwnShardState | None],
    own: OwnShardState | None,
    device: torch.device,
) -> list[OwnShardState]:
    """Return one value of all shards of a parameter, on its device."""
    longest = max(part.end - part.begin for part in parts if part is not None)
    dtype = next(part.values[name].dtype for part in parts if part is not None)
    padded = torch.zeros(longest, dtype=dtype, device=device)
    if own is not None:
        padded[: own.end - own.begin] = own.values[name]
    rows = torch.empty(len(parts), longest, dtype=dtype, device=device)
    workers.backend.all_gather(rows.view(-1), padded, call=STATE)
    return [
        OwnShardState(part.begin, part.end, {name: row[: part.end - part.begin]})
        for part, row in zip(parts, rows, strict=True)
        if part is not None
    ]
