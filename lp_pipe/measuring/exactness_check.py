"""Compare a model's training as a pipeline with the plain loop, and find where the two first differ."""

import copy
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.launch import launch
from lp_pipe.pipeline.add import add_pipeline
from lp_pipe.pipeline.compute.recompute import is_recomputing
from lp_pipe.pipeline.layers.message import tensors_of
from lp_pipe.pipeline.layers.model import Model, check_in_order
from lp_pipe.pipeline.layers.skips import Skip, layer_sources
from lp_pipe.pipeline.layers.wrapper import Wrapper
from lp_pipe.pipeline.plain_loop import PlainLoop
from lp_pipe.pipeline.schedule.numbers_given import as_float
from lp_pipe.private_torch import pytree
from lp_pipe.program import Program
from lp_pipe.resources import Resources
from lp_pipe.training.device import CPU, Device, choose_device, computing_with
from lp_pipe.training.rng import current_microbatch


@dataclass(frozen=True)
class CheckReport:
    """The result of `check`; it is true if nothing differs.

    All fields but `equal` and `steps` say where the first difference is; None if there is none.

    layer: index of the layer that has another output from equal inputs (`microbatch` says in which). None and
        a `name`: all outputs are equal, but this parameter or buffer is not after the step (None again: the loss).
    max_difference: the largest absolute difference; infinite between other shapes.
    """

    equal: bool
    steps: int
    step: int | None = None
    microbatch: int | None = None
    layer: int | None = None
    name: str | None = None
    max_difference: float | None = None
    reason: str = ""

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        if self.equal:
            return f"equal: the pipeline and the plain loop have the same bits after {self.steps} steps"
        return f"different in step {self.step}: {self.reason}"


def check(model: Model, batches: Iterable[tuple[Any, Any]], **pipeline_options: Any) -> CheckReport:
    """Train one step on each batch as a pipeline (in thread mode) and in a plain loop; compare the results.

    The model's own modules stay as they are. The report names a layer that depends on more than its inputs, its
    parameters and the generator under `step_rng`: one that draws from `random` or numpy, or shares Python state with
    other layers.

    pipeline_options: as for `add_pipeline`, but without `inputs`.

    Raises:
        PipelineError: there are no batches, or the pipeline cannot be built or run.
    """
    if not isinstance(model, Model):
        raise PipelineError(f"check() takes a pp.Model(layers, loss, optimizer) first, not {type(model).__name__}")
    batches = list(batches)
    if not batches:
        raise PipelineError("check() needs at least one (input, target) pair")
    there, here = _Log(), _Log()
    program = Program("check")
    handle = add_pipeline(program, _watched(model, there), **{"checks": "always", **pipeline_options})
    if handle.is_asynchronous:
        raise PipelineError(
            "check() compares with a plain loop, from which an asynchronous schedule differs by design: check the "
            "model with '1f1b'"
        )
    device = pipeline_options.get("device", "auto")
    # The device of the first stage: on another kind, kernels sum in another order.
    place = choose_device(str(device if isinstance(device, Device) else device[0]), 0)
    with computing_with((pipeline_options.get("resources") or Resources()).threads):
        # Built before the launch: what it refuses, such as an optimizer, is then an error here and not of a stage.
        plain = PlainLoop(
            _watched(model, here),
            pipeline_options.get("microbatches", 8),
            clip_grad_norm=as_float(pipeline_options.get("clip_grad_norm")),
            precision=pipeline_options.get("precision", "fp32"),
            replicas_by_layer=handle.replicas_by_layer,
            device=place,
            on_nan=pipeline_options.get("on_nan", "ignore"),
        )
        # A folder of its own, removed with the metrics in it: a check is no run that anybody looks for.
        with (
            tempfile.TemporaryDirectory(prefix="lp-check-") as run_dir,
            launch(program, "thread", run_dir=run_dir) as run,
        ):
            pipeline = run.client(handle)
            for step, batch in enumerate(batches):
                losses = pipeline.step(batch).loss, plain.step(batch)
                found = _outputs_differ(there, here)
                if found is None:
                    found = _results_differ(losses, pipeline.state_dict(), plain.state_dict())
                if found is not None:
                    return replace(found, steps=step + 1, step=step)
                there.outputs.clear()
                here.outputs.clear()
    return CheckReport(equal=True, steps=len(batches))


class _Log:
    """The output of each layer in each micro-batch of a step; the copies of the layers share it."""

    def __init__(self) -> None:
        self.outputs: dict[int, dict[int, tuple[str, list[Tensor]]]] = {}  # by layer, then micro-batch

    def __deepcopy__(self, memo: Any) -> Self:
        return self


class _RecordedLayer(Wrapper):
    goes_by_its_layer = True

    def __init__(self, layer: Any, index: int, log: _Log) -> None:
        super().__init__(layer)
        self.index = index
        self.log = log

    def around(self, layer: Any) -> Self:
        return type(self)(layer, self.index, self.log)

    def forward(self, *inputs: Any) -> Any:
        output = self.layer(*inputs)
        if self.training and not is_recomputing():
            entry = type(self.layer).__name__, [_kept(tensor) for tensor in tensors_of(output)]
            self.log.outputs.setdefault(self.index, {})[current_microbatch()] = entry
        return output


def _kept(tensor: Tensor) -> Tensor:
    kept: Tensor = _strided(tensor.detach()).to(CPU, copy=True)
    return kept


def _strided(tensor: Any) -> Any:
    """Return the tensor in a dense layout, to be compared."""
    is_sparse = isinstance(tensor, Tensor) and tensor.layout is not torch.strided
    return tensor.to_dense() if is_sparse else tensor


def _watched(model: Model, log: _Log) -> Model:
    layers = model.layers
    if callable(layers) and not isinstance(layers, nn.Module):
        return replace(model, layers=_watched_function(layers, log))
    return replace(model, layers=[_watch(source, index, log) for index, source in enumerate(layer_sources(model))])


def _watched_function(function: Callable[[], Any], log: _Log) -> Callable[[], Iterator[nn.Module]]:
    def layers() -> Iterator[nn.Module]:
        made = function()
        check_in_order(made)
        memo: dict[int, Any] = {}  # one for all layers, so that what they share stays shared
        for index, layer in enumerate(made):
            yield _watch(copy.deepcopy(layer, memo), index, log)

    return layers


def _watch(layer: Any, index: int, log: _Log) -> Any:
    return (
        layer.around(_watch(layer.layer, index, log)) if isinstance(layer, Skip) else _RecordedLayer(layer, index, log)
    )


def _outputs_differ(there: _Log, here: _Log) -> CheckReport | None:
    """Return a report of the first micro-batch, and in it the first layer with another output."""
    microbatches = max((len(calls) for calls in here.outputs.values()), default=0)
    for microbatch in range(microbatches):
        for layer, calls in sorted(here.outputs.items()):
            kind, wanted = calls[microbatch]
            got = there.outputs[layer][microbatch][1]
            difference = _difference(got, wanted)
            if difference is not None:
                reason = (
                    f"layer {layer} ({kind}) is the first whose output differs, by up to {difference:.3g}, in "
                    f"micro-batch {microbatch}; its inputs are equal: does it use random numbers that step_rng does "
                    "not seed, or state that is neither parameter nor buffer?"
                )
                return _different(difference, reason, microbatch=microbatch, layer=layer)
    return None


def _results_differ(losses: tuple[float, float], got: dict[str, Any], wanted: dict[str, Any]) -> CheckReport | None:
    loss = _difference([torch.tensor(losses[0])], [torch.tensor(losses[1])])
    if loss is not None:
        reason = (
            f"the outputs of all layers are equal, but the losses are {losses[0]!r} and {losses[1]!r}: does the loss "
            "keep state that is no buffer of a module, draw from a generator of its own, or call autograd, which sees "
            "the last stage alone?"
        )
        return _different(loss, reason)
    for name, value in wanted.items():
        both = [[_strided(leaf) for leaf in pytree.tree_leaves(one)] for one in (got[name], value)]
        difference = _difference(*both)
        if difference is not None:
            index = name.split(".", 1)[0]
            layer = f" (of layer {index})" if index.isdecimal() else ""
            reason = (
                f"the outputs of all layers are equal, but after the step {name}{layer} is the first "
                f"parameter or buffer that differs, by up to {difference:.3g}: does a backward, or the optimizer, "
                "depend on more than gradients and parameters?"
            )
            return _different(difference, reason, name=name)
    return None


def _different(max_difference: float, reason: str, **where: Any) -> CheckReport:
    """Return a report of a difference; `check` adds the step. where: the microbatch and layer, or the name."""
    return CheckReport(equal=False, steps=0, max_difference=max_difference, reason=reason, **where)


def _difference(got: Sequence[Any], wanted: Sequence[Any]) -> float | None:
    """Return the largest difference between two lists of tensors; None if all bits are equal (or both are NaN)."""
    if len(got) != len(wanted):
        return float("inf")
    differences = [_distance(one, other) for one, other in zip(got, wanted, strict=True) if not _same(one, other)]
    return max(differences, default=None)


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _distance(one: Any, other: Any) -> float:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        return float("inf")
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.double
    return float((one.detach().to(wide) - other.detach().to(wide)).abs().nan_to_num(float("inf")).max())
