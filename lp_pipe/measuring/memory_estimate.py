"""An estimate of the memory of each process of a training, before anything is launched.

Parameters, gradients and optimizer state follow from the model: its layers, and its optimizer, run on torch's meta
device, which allocates nothing. What waits for backwards follows from a profile, or from a forward of a sample.
Source of the bytes by ZeRO stage: Rajbhandari et al., 2020, section 5.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lp_pipe.errors import LpPipeError, NotSupported, PipelineError
from lp_pipe.launch.plan.hardware import this_host
from lp_pipe.measuring.layer_rounds import Work
from lp_pipe.nodes import Node
from lp_pipe.pipeline.compute.recompute_option import Recompute, check_recompute, runs_of
from lp_pipe.pipeline.config import PipelineConfig, WorkerConfig
from lp_pipe.pipeline.layers.build import outlined
from lp_pipe.pipeline.layers.model import Model, OptimizerFactory
from lp_pipe.pipeline.layers.named_layers import name_prefix
from lp_pipe.pipeline.layers.optimizer_factories import make_optimizer
from lp_pipe.pipeline.layers.skips import layer_sources
from lp_pipe.pipeline.layers.tied import Names, tied_names
from lp_pipe.pipeline.layout import StageLayout, layout_of
from lp_pipe.pipeline.partitioning.profile import Profile
from lp_pipe.pipeline.schedule import Action, Schedule
from lp_pipe.program import Program
from lp_pipe.resources import Resources
from lp_pipe.training.device import check_precision
from lp_pipe.training.optimizer_state import state_of

T = TypeVar("T")
_GIB = 1 << 30
_BUCKET_BYTES = 4 << 20  # of gradients, or of updated parameters, that replicas exchange at a time
_ASSUMED_OPTIMIZER_FACTOR = 2  # bytes of state for each byte of a parameter: Adam's


@dataclass(frozen=True)
class ProcessMemory:
    """The bytes of each process of a stage worker.

    stages: the virtual stages that it runs. processes: how many such processes there are, the worker's replicas.
    activation_bytes: what waits for backwards at a time, at most; None: not known without a profile or a sample.
    exchange_bytes: buffers in which replicas add up gradients, or gather parameters.
    """

    worker: int
    stages: tuple[int, ...]
    processes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    activation_bytes: int | None
    exchange_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum of what is known."""
        training = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return training + self.buffer_bytes + (self.activation_bytes or 0) + self.exchange_bytes


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of all processes of a pipeline.

    workers: one for each stage worker. notes: what was assumed. advice: where `limit` was given and a process needs
    more, what would have to change.
    """

    workers: tuple[ProcessMemory, ...]
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def largest_bytes(self) -> int:
        """The bytes of the process that needs the most."""
        return max(worker.total_bytes for worker in self.workers)

    @property
    def all_bytes(self) -> int:
        """The bytes of all processes together."""
        return sum(worker.total_bytes * worker.processes for worker in self.workers)

    def lines(self) -> list[str]:
        """Return a table with a line for each worker, the notes and the advice."""
        head = ("WORKER", "STAGES", "PROCESSES", "PARAMETERS", "GRADIENTS", "OPTIMIZER", "BUFFERS", "ACTIVATIONS")
        rows: list[tuple[str, ...]] = [(*head, "EXCHANGE", "EACH")]
        for one in self.workers:
            training = (one.parameter_bytes, one.gradient_bytes, one.optimizer_bytes, one.buffer_bytes)
            sizes = (*training, one.activation_bytes, one.exchange_bytes, one.total_bytes)
            stages = ",".join(map(str, one.stages))
            rows.append((str(one.worker), stages, str(one.processes), *map(_size, sizes)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return [*(line.rstrip() for line in padded), *self.notes, *self.advice]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def memory(
    model: Model,
    replicas: int | Sequence[int] = 1,
    zero: int = 0,
    precision: str = "fp32",
    *,
    stages: int | Sequence[int] = 1,
    schedule: str = "1f1b",
    chunks: int | None = None,
    microbatches: int = 8,
    recompute: Recompute = "none",
    profile: Profile | None = None,
    sample: tuple[Any, Any] | None = None,
    limit: int | None = None,
) -> MemoryEstimate:
    """Return an estimate of the memory that each process of a pipeline with these options needs.

    replicas, zero, precision, stages, …: as those of `add_pipeline`. precision only changes the activations: parameters
        stay as they are.
    profile: of the model, for the activations; measured with this precision and size of micro-batch.
    sample: instead of a profile an (input, target), one micro-batch, of which a forward runs in this process.
    limit: bytes that a process may use. If one needs more, `advice` says what would have to change.

    Raises:
        PipelineError: the model cannot be cut so, or the profile is of another one.
        ScheduleError: the schedule does not exist for these numbers.
        NotSupported: zero is 2 or 3, and there are several stages.
    """
    if not isinstance(model, Model):
        raise PipelineError(f"memory takes a pp.Model(layers, loss, optimizer), not {type(model).__name__}")
    check_precision(precision)
    check_recompute(recompute)
    sources = layer_sources(model)
    tied = tied_names(sources, model.tied)
    if sample is not None:
        work = Work(sources, tied, model.loss, model.seed, sample, "cpu", precision)
        kept: list[tuple[float, float]] | None = work.rounds().kept_bytes()
    else:
        kept = _kept(profile, len(sources)) if profile is not None else None
    sizes, notes = _sizes_of(sources, tied, model.optimizer, kept)
    if precision != "fp32" and sample is not None:
        sizes = [_with_casts(layer) for layer in sizes]
    elif precision != "fp32" and profile is not None:
        notes.append(f"activations: as the profile has them, in fp32; give a sample for those in {precision}")
    options = _Options(stages, chunks, schedule, microbatches, replicas, recompute, zero)
    return _Estimator(sources, sizes, notes).estimate(options, limit)


def program_memory(program: Program, mode: str) -> dict[str, MemoryEstimate]:
    """Return the estimate of each pipeline of a program, by its group, with advice where it does not fit.

    A process may use `resources.memory`; without that the memory of its GPU, or its part of this host's.
    """
    return {
        label: _of_nodes(nodes, program.options(label).resources, mode)
        for label, nodes in program.groups.items()
        if any(_parts(node, PipelineConfig) for node in nodes)
    }


def _of_nodes(nodes: Sequence[Node[Any]], resources: Resources, mode: str) -> MemoryEstimate:
    config: PipelineConfig = next(found for node in nodes for found in _parts(node, PipelineConfig))
    layers: dict[int, Any] = {}
    firsts: dict[int, int] = {}
    for node in nodes:
        for part in _parts(node, WorkerConfig):
            for stage, (first, sources) in part.sources.items():
                firsts[stage] = first
                layers.update(enumerate(sources, start=first))
    sources = [layers[index] for index in sorted(layers)]
    sizes, notes = _sizes_of(sources, config.tied, config.optimizer, None)
    if config.is_offloaded and _uses_gpu(config, resources):
        state = sum(layer.sharded_state + layer.whole_state for layer in sizes)
        sizes = [replace(layer, sharded_state=0, whole_state=0) for layer in sizes]
        copies = sum(layer.parameters for layer in sizes)
        notes.append(
            f"offload: not counted are {_size(state)} of optimizer state and {_size(copies)} of copies of parameters, "
            "which are in the host's memory" + (", divided among the replicas" if config.zero else ", in each replica")
        )
    options = _Options(
        [firsts[stage] for stage in sorted(firsts)][1:],
        config.chunks,
        config.schedule,
        config.microbatches,
        config.replicas,
        config.recompute,
        config.zero,
    )
    limit = resources.memory or _device_bytes(config, resources)
    if limit is None and mode != "multi_host":
        limit = this_host().memory_bytes // config.ranks.world_size
    return _Estimator(sources, sizes, notes).estimate(options, limit)


def _parts(node: Node[Any], kind: type[T]) -> list[T]:
    return [value for _, value in node.launch_parts() if isinstance(value, kind)]


def _device_bytes(config: PipelineConfig, resources: Resources) -> int | None:
    """Return the memory of a stage's GPU, if it has one and this host has the like."""
    if not _uses_gpu(config, resources) or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def _uses_gpu(config: PipelineConfig, resources: Resources) -> bool:
    return resources.gpus > 0 or any(name.startswith("cuda") for name in config.devices)


@dataclass(frozen=True)
class _LayerSizes:
    """The bytes of a layer. A parameter that earlier layers have too counts there, and as `borrowed` here.

    sharded_state, whole_state: of its optimizer, with a number for each element of a parameter, and else.
    kept, output: what its forward leaves for its backward, and its output; None: not known.
    casts: copies of parameters in lower precision, which all micro-batches share.
    """

    parameters: int
    trained: int
    buffers: int
    borrowed: Mapping[str, int]
    sharded_state: int
    whole_state: int
    kept: float | None
    output: float
    casts: float = 0.0


def _with_casts(layer: _LayerSizes) -> _LayerSizes:
    """Return the sizes of a layer in 16-bit precision, whose casts of the parameters were measured as kept."""
    assert layer.kept is not None, "a sample was measured"
    casts = min(layer.kept, layer.trained / 2)
    return replace(layer, kept=layer.kept - casts, casts=casts)


def _sizes_of(
    sources: Sequence[Any],
    tied: Sequence[Names],
    optimizer: OptimizerFactory,
    kept: Sequence[tuple[float, float]] | None,
) -> tuple[list[_LayerSizes], list[str]]:
    """Return the sizes of each layer, and what was assumed."""
    firsts = {name: names[0] for names in tied for name in names[1:]}
    outlines = [outlined(source) for source in sources]
    own: list[dict[str, nn.Parameter]] = []
    borrowed: list[dict[str, int]] = []
    for index, layer in enumerate(outlines):
        # Names of tied parameters are those inside, "2.weight".
        names = {f"{index}.{name}": parameter for name, parameter in layer.named_parameters()}
        prefix = name_prefix(index, layer)
        own.append({f"{prefix}{name.partition('.')[2]}": one for name, one in names.items() if name not in firsts})
        borrowed.append({firsts[name]: parameter.nbytes for name, parameter in names.items() if name in firsts})
    states, notes = _optimizer_bytes(optimizer, [pair for layer in own for pair in layer.items()])
    sizes = []
    for index, (layer, parameters) in enumerate(zip(outlines, own, strict=True)):
        of_layer = [states[name] for name in parameters]
        sizes.append(
            _LayerSizes(
                parameters=sum(parameter.nbytes for parameter in parameters.values()),
                trained=sum(parameter.nbytes for parameter in parameters.values() if parameter.requires_grad),
                buffers=sum(buffer.nbytes for buffer in layer.buffers()),
                borrowed=borrowed[index],
                sharded_state=sum(sharded for sharded, _ in of_layer),
                whole_state=sum(whole for _, whole in of_layer),
                kept=None if kept is None else kept[index][0],
                output=0.0 if kept is None else kept[index][1],
            )
        )
    if kept is None:
        notes.append("activations: not known without a profile (pp.profile, lp_pipe profile) or a sample")
    return sizes, notes


def _optimizer_bytes(
    factory: OptimizerFactory, named: Sequence[tuple[str, nn.Parameter]]
) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Return the bytes of state of each parameter, with a number for each element, and else."""
    found = dict.fromkeys((name for name, _ in named), (0, 0))
    trained: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named:
        if parameter.requires_grad:
            copy = nn.Parameter(torch.empty_like(parameter, device="meta"))
            copy.grad = torch.empty_like(copy)
            trained.append((name, copy))
    if not trained:
        return found, []
    try:
        optimizer = make_optimizer(factory, trained)
        optimizer.step()
        states = state_of(optimizer)
    except Exception as error:  # the user's optimizer may look at numbers, which the meta device does not have
        for name, parameter in trained:
            found[name] = parameter.nbytes * _ASSUMED_OPTIMIZER_FACTOR, 0
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        return found, [
            f"optimizer: does not run on the meta device ({what}): {_ASSUMED_OPTIMIZER_FACTOR} bytes of state for each "
            "byte of parameters are assumed"
        ]
    for name, parameter in trained:
        values = [value for value in states.get(parameter, {}).values() if isinstance(value, Tensor)]
        sharded = sum(value.nbytes for value in values if value.shape == parameter.shape and value.dim())
        found[name] = sharded, sum(value.nbytes for value in values) - sharded
    return found, []


def _kept(profile: Profile, layers: int) -> list[tuple[float, float]]:
    if len(profile.layers) != layers:
        raise PipelineError(
            f"memory(profile=…): the profile has {len(profile.layers)} layers, and the model {layers}: give a profile "
            "of this model"
        )
    return [(layer.kept_bytes, layer.activation_bytes) for layer in profile.layers]


@dataclass(frozen=True)
class _Options:
    """The options of `add_pipeline` that decide how much memory is needed."""

    stages: int | Sequence[int]
    chunks: int | None
    schedule: str | Schedule
    microbatches: int
    replicas: int | Sequence[int]
    recompute: Recompute
    zero: int

    @property
    def most_replicas(self) -> int:
        return self.replicas if isinstance(self.replicas, int) else max(self.replicas)


class _Estimator:
    """Estimates of one model, for any options."""

    def __init__(self, sources: Sequence[Any], sizes: Sequence[_LayerSizes], notes: Sequence[str]) -> None:
        self._sources = sources
        self._sizes = sizes
        self._notes = notes
        self._usual_microbatches = 0  # for which the activations are

    def estimate(self, options: _Options, limit: int | None) -> MemoryEstimate:
        self._usual_microbatches = options.microbatches
        workers, layout = self._workers(options)
        found = MemoryEstimate(tuple(workers), tuple(self._notes))
        if limit is None or found.largest_bytes <= limit:
            return found
        largest = max(workers, key=lambda worker: worker.total_bytes)
        what = f"worker {largest.worker} needs {_size(largest.total_bytes)} in a process, and has {_size(limit)}"
        fitting = list(self._that_fit(options, layout, limit))
        cure = ": " + ", or ".join(fitting) if fitting else self._least(options, layout)
        return replace(found, advice=(f"does not fit: {what}{cure}",))

    def _that_fit(self, options: _Options, layout: StageLayout, limit: int) -> Iterator[str]:
        """Yield the smallest change of each option with which all processes fit."""
        for changes in self._changes(options, layout):
            for text, changed in changes:
                needed = self._largest(changed)
                if needed is not None and needed <= limit:
                    yield f"{text} needs {_size(needed)}"
                    break

    def _least(self, options: _Options, layout: StageLayout) -> str:
        tried = [
            (needed, text)
            for changes in self._changes(options, layout)
            for text, changed in changes
            if (needed := self._largest(changed)) is not None
        ]
        if not tried:
            return ": use a device or host with more memory"
        needed, text = min(tried)
        return f": of zero=, stages=, recompute= and microbatches=, {text} needs the least, {_size(needed)}"

    def _changes(self, options: _Options, layout: StageLayout) -> Iterator[list[tuple[str, _Options]]]:
        workers, count = len(layout.schedule.workers), len(self._sources)
        replicas = max(2, options.most_replicas)
        more = f", replicas={replicas}" if options.most_replicas < 2 else ""
        yield [
            (f"zero={zero}{more}", replace(options, zero=zero, replicas=replicas))
            for zero in range(options.zero + 1, 4 if workers == 1 else 2)
        ]
        if options.zero < 2:
            doubled = [workers << power for power in range(1, 8) if workers << power < count] + [count]
            usual = options if isinstance(options.replicas, int) else replace(options, replicas=replicas)
            yield [(f"stages={more}", replace(usual, stages=more)) for more in doubled if more > workers]
        if self._sizes[0].kept is not None:
            if options.recompute == "none":
                yield [('recompute="full"', replace(options, recompute="full"))]
            doubled = [options.microbatches << power for power in range(1, 5)]
            yield [(f"microbatches={more}", replace(options, microbatches=more)) for more in doubled]

    def _largest(self, options: _Options) -> int | None:
        try:
            return max(worker.total_bytes for worker in self._workers(options)[0])
        except LpPipeError:
            return None

    def _workers(self, options: _Options) -> tuple[list[ProcessMemory], StageLayout]:
        if options.zero not in range(4):
            raise PipelineError(f"zero={options.zero!r}: must be 0, 1, 2 or 3")
        layout = layout_of(
            self._sources,
            options.stages,
            options.chunks,
            options.schedule,
            options.microbatches,
            options.replicas,
            options.recompute,
        )
        if options.zero > 1 and layout.schedule.stages > 1:
            raise NotSupported(
                f"zero={options.zero} with {layout.schedule.stages} stages: use stages=1, or zero=1 with any stages"
            )
        return [self._worker(layout, worker, options) for worker in range(len(layout.schedule.workers))], layout

    def _worker(self, layout: StageLayout, worker: int, options: _Options) -> ProcessMemory:
        starts = [0, *layout.cuts, len(self._sources)]
        own = [stage for stage, its in enumerate(layout.schedule.placement) if its == worker]
        layers = [self._sizes[index] for stage in own for index in range(starts[stage], starts[stage + 1])]
        mine = {index for stage in own for index in range(starts[stage], starts[stage + 1])}
        borrowed = {name: size for layer in layers for name, size in layer.borrowed.items()}
        borrowed_bytes = sum(size for name, size in borrowed.items() if int(name.partition(".")[0]) not in mine)
        count = layout.replicas[worker]
        parameters, trained = sum(layer.parameters for layer in layers), sum(layer.trained for layer in layers)
        sharded = sum(layer.sharded_state for layer in layers)
        whole = sum(layer.whole_state for layer in layers)
        activations = self._activations(layout, worker, starts, options)
        exchange = 0
        if count > 1:
            largest = max(layer.parameters for layer in layers)
            exchange = min(trained, _BUCKET_BYTES) if options.zero < 2 else 2 * largest  # a layer, and its gradients
            if options.zero == 1:  # updated parameters travel when no activations wait
                bucket = min(parameters, max(largest, _BUCKET_BYTES))
                exchange += max(0, bucket + _share(bucket, count) - (activations or 0))
        return ProcessMemory(
            worker,
            tuple(own),
            count,
            parameter_bytes=parameters if options.zero < 3 else _share(parameters, count),
            gradient_bytes=trained if options.zero < 2 else _share(trained, count),
            optimizer_bytes=whole + (sharded if options.zero < 1 else _share(sharded, count)),
            buffer_bytes=sum(layer.buffers for layer in layers) + borrowed_bytes,
            activation_bytes=activations,
            exchange_bytes=exchange,
        )

    def _activations(self, layout: StageLayout, worker: int, starts: Sequence[int], options: _Options) -> int | None:
        """Return the most bytes that wait for backwards at a time on a replica of the worker."""
        kept: dict[int, float] = {}
        again = 0.0  # what recomputing makes once more, for the time of a backward
        for stage, its in enumerate(layout.schedule.placement):
            if its != worker:
                continue
            first, end = starts[stage], starts[stage + 1]
            kept[stage] = 0.0
            for run in runs_of(layout.recompute, first, self._sources[first:end]):
                of_layers = [self._sizes[index].kept for index in range(run.first, run.end)]
                known = [size for size in of_layers if size is not None]
                if len(known) < len(of_layers):
                    return None
                if run.is_recomputed:
                    again = max(again, sum(known))
                    kept[stage] += self._sizes[run.first - 1].output if run.first else 0.0
                else:
                    kept[stage] += sum(known)
        count = layout.replicas[worker]
        actions = layout.schedule.workers[worker]
        peak = max(
            _peak([action for action in actions if action.microbatch % count == replica], kept)
            for replica in range(count)
        )
        smaller = self._usual_microbatches / options.microbatches
        casts = sum(self._sizes[index].casts for stage in kept for index in range(starts[stage], starts[stage + 1]))
        return math.ceil((peak + again) * smaller + casts)


def _peak(actions: Sequence[Action], kept: Mapping[int, float]) -> float:
    peak = now = 0.0
    for action in actions:
        if action.op == "F":
            now += kept[action.stage]
            peak = max(peak, now)
        elif action.op in ("B", "W"):
            now -= kept[action.stage]
    return peak


def _share(size: int, count: int) -> int:
    return -(-size // count)


def _size(size: int | None) -> str:
    if size is None:
        return "?"
    return f"{size / _GIB:.2f} GiB" if size >= _GIB // 10 else f"{size / (1 << 20):.2f} MiB"
