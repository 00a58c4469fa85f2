"""A virtual stage: its layers, and the forwards that still wait for their backwards."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lp_pipe.errors import PipelineError, add_note
from lp_pipe.pipeline.compute.activation_meter import current_meter, held_for_later
from lp_pipe.pipeline.compute.graph_entry import enter, phony
from lp_pipe.pipeline.compute.recompute import RecomputedSegment
from lp_pipe.pipeline.compute.recompute_option import LayerRun, Recompute, runs_of
from lp_pipe.pipeline.compute.shared_casts import SharedCasts
from lp_pipe.pipeline.compute.split_backward import Roots, SplitBackward, backward, backward_later, edges_of
from lp_pipe.pipeline.config import PipelineConfig, WorkerConfig
from lp_pipe.pipeline.layers.build import are_exclusive, build_layers
from lp_pipe.pipeline.layers.message import Message, tensors_of, to_message
from lp_pipe.pipeline.layers.model_names import layer_names
from lp_pipe.pipeline.layers.named_layers import NamedLayers
from lp_pipe.pipeline.layers.overlaps import ReadOnlyTensors, address_of
from lp_pipe.pipeline.layers.skips import call
from lp_pipe.pipeline.layers.tied import layer_of, tie
from lp_pipe.pipeline.layers.wrapper import unwrapped
from lp_pipe.private_torch import buffers_of, has_node_hooks
from lp_pipe.training.buffer_snapshot import BufferPlace, with_buffers
from lp_pipe.training.device import CPU, autocast
from lp_pipe.training.rng import PausableRng, backward_place, step_rng
from lp_pipe.training.write_tracker import WritePolicy, WriteTracker, layers_with_max_norm

EVALUATION = -1  # in place of a step's number
_NO_HOOKS = (
    "torch.func's grad, vjp and jacrev do not give access to what autograd saves, which recompute and the counting of "
    "activations (profile, profile_memory) need: leave the layer out of recompute; to profile it, let it call "
    "torch.autograd.grad(..., create_graph=True)"
)
_Layers = list[tuple[int, nn.Module]]  # (index in the model, layer)
_NOTHING = nullcontext()


class LayerCall(NamedTuple):
    """A call of a layer: its index, the step and the micro-batch."""

    layer: int
    step: int
    microbatch: int


@dataclass(slots=True)
class ActivationStash:
    """The values that a forward leaves for its backward.

    outputs: places in the graph of the outputs, which may themselves be gone.
    input_gradients: where the gradients of those inputs arrive that require one.
    stashed: by name, the places of values that other stages pop.
    popped_gradients: by name, where the gradients of values popped here arrive.
    draws: step and micro-batch, which random numbers depend on.
    """

    draws: tuple[int, int] = (EVALUATION, 0)
    outputs: list[GradientEdge] = field(default_factory=list)
    input_gradients: list[Tensor | None] = field(default_factory=list)
    stashed: dict[str, list[GradientEdge]] = field(default_factory=dict)
    popped_gradients: dict[str, list[Tensor | None]] = field(default_factory=dict)

    @property
    def is_awaited(self) -> bool:
        """Whether another stage waits for a gradient of this backward."""
        return bool(self.input_gradients) or any(self.popped_gradients.values())


class _Later(NamedTuple):
    """The second part of a backward."""

    draws: tuple[int, int]
    accumulate: Callable[[Roots], None]


class BlockMemory(Protocol):
    """The memory of a stage's parameters, which is there only while a block of layers runs."""

    def enter(self, block: int) -> None:
        """Note that the forward of a block begins."""

    def drawing(self, rng: PausableRng) -> AbstractContextManager[None]:
        """Return the context of a backward, in which waits for other replicas let their threads draw."""

    def leave(self, block: int, inputs: Any, outputs: Any, *, trains: bool) -> None:
        """Note that the forward of a block has ended. trains: a backward will follow."""


class Stage(NamedLayers):
    """Consecutive layers of the model, called one after another.

    tied: parameters that other stages have too, by the first of their names; those of earlier stages are borrowed.
    recompute: which layers keep only their inputs until the backward.
    device: where the layers are and compute.
    shared_buffers: names of buffers that other stages have copies of, each with the error to raise when a forward
        writes to it.
    """

    def __init__(
        self,
        index: int,
        first_layer: int,
        layers: list[nn.Module],
        seed: int,
        tied: Mapping[str, nn.Parameter] = MappingProxyType({}),
        recompute: Recompute = "none",
        precision: str = "fp32",
        device: torch.device = CPU,
        shared_buffers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        borrowed = [tied[name] for name in tied if layer_of(name) < first_layer]
        super().__init__(layers, first_layer, borrowed)
        self.index = index
        self._seed = seed
        self._precision = precision
        self._device_type = device.type
        for layer in layers:
            layer.to(device)
        self._tied = tied
        watched = with_buffers(layers)  # a BatchNorm's backward needs no buffer in train mode
        self.writes = WriteTracker(
            with_buffers=watched, buffers=WritePolicy.COPY, refused=_places_of(shared_buffers, layers, first_layer)
        )
        self._tracking = self.writes.tracked if watched else _nothing
        self._runs = [
            self._prepared(r)
            for r in runs_of(recompute, first_layer, layers, layers_with_max_norm(layers, first_layer))
        ]
        self._casts = None if precision == "fp32" else SharedCasts()
        self._without_hooks: set[int] = set()  # layers that call torch.func
        self._storage = StageStorage(layers)
        self.marks_shared_memory = False  # whether messages say which of their tensors must not be written to
        self._phony = phony()
        self.activation_stash: dict[int, ActivationStash] = {}
        self._weight_stash: dict[int, _Later] = {}
        self._node_hooks = _with_node_hooks(layers, first_layer)
        self._popped_gradients: dict[tuple[int, str], list[Tensor | None]] = {}
        self.memory: BlockMemory | None = None  # of a stage whose parameters come and go
        # A function to call in place of `call` in forwards of training, to see what a layer makes.
        self.watch: Callable[[LayerCall, nn.Module, Any, dict[str, Any]], Any] | None = None

    def forward(
        self,
        message: Message,
        step: int,
        microbatch: int,
        skips: dict[str, Any] | None = None,
        number: int | None = None,
    ) -> Any:
        """Run a train-mode forward of one micro-batch; its graph waits in the stash until `backward`.

        Returns the last layer's output with its graph, for the loss or for `to_message`.

        number: the number by which `backward` will refer to it; `microbatch` by default.
        skips: by name, the messages with the values that this stage's Pops take from other stages; afterwards the
            values that its Stashes have for other stages, with their graph.
        """
        if not self.is_idle:
            self.writes.separate()
        stash = self.activation_stash[microbatch if number is None else number] = ActivationStash((step, microbatch))
        with self._tracking():
            return self._run(message, step, microbatch, stash, {} if skips is None else skips)

    def divide_into_blocks(self) -> list[list[nn.Module]]:
        """Run each layer, and each recomputed segment, by itself from now on; return the layers of each."""
        runs: list[tuple[_Layers, RecomputedSegment | None]] = []
        for layers, segment in self._runs:
            runs += [(layers, segment)] if segment is not None else [([layer], None) for layer in layers]
        self._runs = runs
        return [[layer for _, layer in layers] for layers, _ in runs]

    @property
    def is_idle(self) -> bool:
        """Whether no forward waits for its backward, or for a part of it."""
        return not (self.activation_stash or self._weight_stash)

    @property
    def recomputed(self) -> list[RecomputedSegment]:
        """The segments that run again in backwards."""
        return [segment for _, segment in self._runs if segment is not None]

    def message_of(self, value: Any) -> Message:
        """Return a value that the last forward has returned or stashed as a message."""
        return to_message(value, self._storage.addresses() if self.marks_shared_memory else None)

    def run_again(self, value: Any, step: int, microbatch: int) -> Any:
        """Call all layers in order, as in a forward, so that `watch` sees them."""
        return self._call(list(enumerate(self.layers, start=self.first_layer)), step, microbatch, value, {})

    def infer(self, message: Message, skips: dict[str, Any] | None = None) -> Any:
        """Run a forward without a graph; the caller has set eval mode.

        A layer that draws even in eval mode draws the same for every input, so an output does not depend on other
        inputs in flight.
        """
        return self._run(message, EVALUATION, 0, ActivationStash(), {} if skips is None else skips)

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], more: Roots = (), *, defer_weights: bool = False
    ) -> list[Tensor | None]:
        """Accumulate the parameters' gradients; return those of the forward's inputs, in order.

        gradients: one for each output tensor that required one; None if the loss does not depend on it.
        more: other tensors of the stage, with gradients that have come from elsewhere.
        defer_weights: leave the parameters to `backward_weights`.
        """
        roots = [*zip(self.activation_stash[microbatch].outputs, gradients, strict=True), *more]
        return self._backward(microbatch, [root for root in roots if root[1] is not None], defer_weights)

    def backward_from_loss(
        self, microbatch: int, loss: Tensor, gradient: Tensor | None = None, *, defer_weights: bool = False
    ) -> list[Tensor | None]:
        """Run the backward on the stage that computes the loss. gradient: the loss's own; None for 1."""
        return self._backward(microbatch, [(loss, gradient)], defer_weights)

    def backward_weights(self, microbatch: int, more: Roots = ()) -> None:
        """Accumulate the gradients that a backward has deferred, and free the micro-batch's activations."""
        later = self._weight_stash.pop(microbatch)
        with self._drawing(later.draws):
            later.accumulate([root for root in more if root[1] is not None])

    def tied_parameters(self, names: Sequence[str]) -> list[nn.Parameter]:
        """Return this stage's own or borrowed parameters, by the first of each one's names in the model."""
        return [self._tied[name] for name in names]

    def take_gradients(self, names: Sequence[str]) -> list[Tensor | None]:
        """Return the gradients of borrowed parameters after one micro-batch's backward, and remove them."""
        borrowed = self.tied_parameters(names)
        gradients = [parameter.grad for parameter in borrowed]
        for parameter in borrowed:
            parameter.grad = None
        return gradients

    def stashed(self, microbatch: int, name: str) -> list[GradientEdge]:
        """Return the places in the graph of a value that went to another stage."""
        return self.activation_stash[microbatch].stashed[name]

    def take_popped_gradients(self, microbatch: int, name: str) -> list[Tensor | None]:
        """Return the gradients of a value that came from another stage, after the backward."""
        return self._popped_gradients.pop((microbatch, name))

    def discard(self) -> None:
        """Drop the forwards and backwards that an aborted step has not finished."""
        self.activation_stash.clear()
        self._weight_stash.clear()
        self._popped_gradients.clear()
        for parameter in self._borrowed:
            parameter.grad = None

    def _run(self, message: Message, step: int, microbatch: int, stash: ActivationStash, skips: dict[str, Any]) -> Any:
        value = enter(self._phony, message, stash.input_gradients)
        unwritten = [ReadOnlyTensors(tensors_of(value), message.overlapping)] if message.overlapping else []
        for name, skip in skips.items():
            skips[name] = enter(self._phony, skip, stash.popped_gradients.setdefault(name, []))
            unwritten += [ReadOnlyTensors(tensors_of(skips[name]), skip.overlapping)] if skip.overlapping else []
        for block, (layers, segment) in enumerate(self._runs):
            given = value, *skips.values()
            if self.memory is not None:
                self.memory.enter(block)
            if segment is None or step == EVALUATION:
                value = self._call(layers, step, microbatch, value, skips, shares_casts=step != EVALUATION)
            else:
                value = segment.forward(partial(self._call, layers, step, microbatch), value, skips)
            if self.memory is not None:
                self.memory.leave(block, given, (value, *skips.values()), trains=step != EVALUATION)
        for received in unwritten:
            received.check()
        self._storage.elsewhere = unwritten
        if step == EVALUATION:
            return value
        stash.outputs = edges_of(value)
        if skips:
            stash.stashed = {name: edges_of(skip) for name, skip in skips.items()}
        return value

    def _call(
        self,
        layers: _Layers,
        step: int,
        microbatch: int,
        value: Any,
        skips: dict[str, Any],
        *,
        shares_casts: bool = False,
    ) -> Any:
        call_layer = self._call_sharing if shares_casts and self._casts is not None else self._call_layer
        for index, layer in layers:
            try:
                value = call_layer(LayerCall(index, step, microbatch), layer, value, skips)
            except BaseException as error:  # a layer may call sys.exit()
                add_note(error, f"in layer {layer_names([layer], index)[0]}")
                if _refuses_hooks(error):
                    add_note(error, _NO_HOOKS)
                raise
        return value

    def _call_layer(self, place: LayerCall, layer: nn.Module, value: Any, skips: dict[str, Any]) -> Any:
        seeded = step_rng(self._seed, place.layer, place.step, place.microbatch)
        with seeded, autocast(self._precision, self._device_type):
            if self.watch is None or place.step == EVALUATION:
                return call(layer, (value,), skips)
            return self.watch(place, layer, value, skips)

    def _call_sharing(self, place: LayerCall, layer: nn.Module, value: Any, skips: dict[str, Any]) -> Any:
        """Call a layer, and let autograd save casts of its parameters once for all micro-batches."""
        if place.layer in self._without_hooks or self._casts is None:
            return self._call_layer(place, layer, value, skips)
        try:
            with self._casts.sharing():
                return self._call_layer(place, layer, value, skips)
        except RuntimeError as error:
            if not _refuses_hooks(error) or current_meter() is not None:
                raise
        self._without_hooks.add(place.layer)
        return self._call_layer(place, layer, value, skips)

    def _prepared(self, run: LayerRun) -> tuple[_Layers, RecomputedSegment | None]:
        layers = [(index, self.layers[index - self.first_layer]) for index in range(run.first, run.end)]
        if not run.is_recomputed:
            return layers, None
        return layers, RecomputedSegment([layer for _, layer in layers], f"layers {run.first} to {run.end - 1}")

    def _backward(self, microbatch: int, roots: Roots, defer_weights: bool) -> list[Tensor | None]:
        stash = self.activation_stash.pop(microbatch)
        if not defer_weights:
            with self._drawing(stash.draws):
                backward(roots)
        elif roots and stash.is_awaited:
            if self._node_hooks is not None:
                raise PipelineError(
                    f"{self._node_hooks} has a hook of register_backward_hook, which would see only one part of a "
                    "split backward: use register_full_backward_hook, or a schedule that does not split backwards, "
                    "such as '1f1b'"
                )
            with self._drawing(stash.draws):
                split = SplitBackward(roots, self._phony)
            self._weight_stash[microbatch] = _Later(stash.draws, split.accumulate)
        else:  # no input requires a gradient, as on the first stage: no stage waits for any of this
            later = partial(backward_later, roots, held_for_later(grad for _, grad in roots))
            self._weight_stash[microbatch] = _Later(stash.draws, later)
        for name, gradients in stash.popped_gradients.items():
            self._popped_gradients[microbatch, name] = gradients
        return stash.input_gradients

    def _drawing(self, draws: tuple[int, int]) -> AbstractContextManager[Any]:
        """Return the context of a backward: what draws in it (noise on gradients) draws the same in every run."""
        step, microbatch = draws
        place = self._seed, self.first_layer, step, backward_place(microbatch)
        return step_rng(*place) if self.memory is None else self.memory.drawing(PausableRng(*place))


def _nothing() -> AbstractContextManager[None]:
    return _NOTHING


def _places_of(
    shared: Mapping[str, str], layers: Sequence[nn.Module], first_layer: int
) -> dict[str | BufferPlace, str]:
    """Return the places of those of the shared buffers that these layers have, each with its error."""
    found: dict[str | BufferPlace, str] = {}
    for name, why in shared.items():
        index, path = name.split(".", 1)
        if first_layer <= int(index) < first_layer + len(layers):
            inner, _, attribute = path.rpartition(".")
            found[unwrapped(layers[int(index) - first_layer]).get_submodule(inner), attribute] = why
    return found


def _with_node_hooks(layers: Sequence[nn.Module], first_layer: int) -> str | None:
    """Return the module, in words, with a backward hook that torch keeps at a node of the graph; None without one."""
    for index, layer in enumerate(layers, start=first_layer):
        for name, module in layer.named_modules():
            if has_node_hooks(module):
                return f"layer {index}" + (f" ({name})" if name else "") + f", {type(module).__name__},"
    return None


def _refuses_hooks(error: BaseException) -> bool:
    """Return whether torch.func has raised this because a hook of saved tensors is there."""
    return type(error) is RuntimeError and "don't yet support saved tensor hooks" in str(error)


class StageStorage:
    """The memory that a stage keeps: parameters and buffers of its layers, and received tensors that others keep.

    An output may be a part of it, and a write to such an output would change both.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._parameters = [parameter for layer in layers for parameter in layer.parameters()]
        self._with_buffers = with_buffers(layers)
        self.elsewhere: Sequence[ReadOnlyTensors] = ()

    def addresses(self) -> Collection[int]:
        """Return the present addresses: forwards may have replaced buffers."""
        found = {parameter.data_ptr() for parameter in self._parameters}  # all of their memory, except for views
        for module in self._with_buffers:
            found |= {address_of(buffer) for buffer in buffers_of(module).values() if buffer is not None}
        for received in self.elsewhere:
            found |= received.addresses
        found.discard(0)  # 0 stands for tensors without memory
        return found


def stages_of(
    worker: WorkerConfig,
    pipeline: PipelineConfig,
    device: torch.device,
    *,
    owns_sources: bool,
    on_built: Callable[[nn.Module], None] = lambda _: None,
) -> dict[int, Stage]:
    """Build a worker's stages; return them by their numbers, in order.

    on_built: called with each layer that a factory has made.
    owns_sources: ready-made modules were unpickled for this worker alone, so they need not be copied.
    """
    stages = {}
    for index, (first, sources) in sorted(worker.sources.items()):
        layers = build_layers(
            sources, first, pipeline.seed, adopt=owns_sources and are_exclusive(sources), on_built=on_built
        )
        tied = tie(layers, first, pipeline.tied, worker.owners, pipeline.seed)
        stages[index] = Stage(
            index,
            first,
            layers,
            pipeline.seed,
            tied,
            recompute=pipeline.recompute,
            precision=pipeline.precision,
            device=device,
            shared_buffers=pipeline.shared_buffers,
        )
    return stages
