"""Add a pipeline to a program: one node per stage worker, connected by channels."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from lp_pipe.address import Address
from lp_pipe.channels import kinds
from lp_pipe.errors import NotSupported, PipelineError
from lp_pipe.handles import CourierHandle, Handle
from lp_pipe.nodes import CourierNode
from lp_pipe.pipeline.client import PipelineHandle
from lp_pipe.pipeline.compute.recompute_option import Recompute, check_recompute
from lp_pipe.pipeline.conductor.conductor import Conductor
from lp_pipe.pipeline.conductor.on_nan import check_on_nan
from lp_pipe.pipeline.config import PipelineConfig, WorkerConfig
from lp_pipe.pipeline.layers.batch_dims import check_dims
from lp_pipe.pipeline.layers.model import Model
from lp_pipe.pipeline.layers.model_checks import views
from lp_pipe.pipeline.layers.named_layers import model_names
from lp_pipe.pipeline.layers.skips import layer_sources, skip_edges
from lp_pipe.pipeline.layers.tied import Names, layer_of, shared_buffers, tied_edges, tied_names
from lp_pipe.pipeline.layout import layout_of, sufficient_credits
from lp_pipe.pipeline.partitioning.plan import Plan
from lp_pipe.pipeline.planned import errors_of_plan, notes, plan_for, planned_host, replica_seconds
from lp_pipe.pipeline.schedule import Schedule
from lp_pipe.pipeline.schedule.numbers_given import as_float, as_int, is_count
from lp_pipe.pipeline.schedule.registry import registered
from lp_pipe.pipeline.worker.channel_handle import ChannelHandle
from lp_pipe.pipeline.worker.rules import CHECKS, check_model
from lp_pipe.pipeline.worker.worker import StageWorker
from lp_pipe.program import Program
from lp_pipe.resources import Resources
from lp_pipe.torch_version import refuse_too_old
from lp_pipe.training.device import Device, check_devices, check_precision


def add_pipeline(
    program: Program,
    model: Model,
    *,
    stages: int | Sequence[int] | Plan | None = None,
    chunks: int | None = None,
    schedule: str | Path | Schedule | None = None,
    microbatches: int = 8,
    replicas: int | Sequence[int] = 1,
    channel: str = "auto",
    device: Device | Sequence[Device] = "auto",
    recompute: Recompute | None = None,
    precision: str = "fp32",
    clip_grad_norm: float | None = None,
    on_nan: str = "ignore",
    checks: str = "first_step",
    inputs: Handle[Any] | None = None,
    group: str = "stages",
    resources: Resources | None = None,
    on_failure: str = "stop",
    max_restarts: int = 3,
    on_hang: str = "report",
    zero: int = 0,
    offload: str | None = None,
) -> PipelineHandle:
    """Cut `model` into stages, add a node for each stage worker, and return the handle of the pipeline.

    stages: number of stage workers (cuts balanced by parameters), or the cut points (index of each later first layer),
        or a plan of `pp.partition`, with its replicas; default: those of a schedule that has its own, or 2.
    chunks: virtual stages per worker; default: what the schedule needs.
    schedule: a name in `schedules()`, or a Schedule or path to CSV, which are for one number of workers and of
        micro-batches; default: the plan's, or "1f1b".
    microbatches: slices of a batch per step, over all replicas; small batches may give fewer.
    replicas: processes that share a worker's micro-batches (j runs on replica j mod r) and sum their gradients in rank
        order; one number, or one per worker. BatchNorm statistics are those of replica 0's micro-batches.
    channel: how tensors travel between workers: "auto" takes the fastest, "inproc" in thread mode and "shm" between
        processes of one host, the run's transport between hosts; "tls" (between hosts); "grpc"; "gloo"
        (torch.distributed); "nccl" (between GPUs). If one does not fit the mode, `launch` refuses it, or the workers
        fail to start.
    device: where stages compute: "cpu", "cuda", "cuda:1", a torch.device, or one per worker; "auto": a GPU if the node
        sees one.
    recompute: layers that keep only their inputs until their backward, where they run again: "none", "full" (each stage
        as a whole), ("every", k) (each k layers of a stage), or (layer_index, layer) -> bool (each such layer alone);
        default: what the plan says of each stage, or "none".
    precision: of layers and loss, which compute under torch.autocast; parameters stay as they are: "fp32", "bf16", or
        "fp16", whose losses are scaled as torch.amp.GradScaler does it.
    on_nan: what to do with a step with a loss or gradient that is not finite: "ignore" (no check), "stop" with a
        NonFiniteError that names the layer, or "skip": leave out its update, and say why in `StepResult.why_skipped`.
    checks: when to look for misuse that would train silently wrong, such as a layer that writes to what it got: in the
        "first_step", and the first evaluation, of each process; or "always", which makes steps slower.
    inputs: handle of a feeder, a CourierNode with `batch(step) -> (input, target) | None`, a pure function of the step.
    clip_grad_norm: the largest norm of all gradients, over all stages, as in torch's clip_grad_norm_; None: any.
    group, resources: label and Resources of the group of stage workers.
    zero: what the replicas of a worker divide among themselves, with the same results. 1: the optimizer's state. 2: the
        gradients, too. 3: the parameters, too; layers are gathered where they are used. 2 and 3 need stages=1. The
        optimizer must treat elements independently, as SGD, Adam, AdamW and RMSprop do, or say so by a class attribute
        `elementwise = True`.
    offload: "cpu": a stage on a GPU keeps the optimizer's state in the host's memory, with a copy of the parameters
        (with zero, of its shards) that the CPU updates: the results are those of an optimizer on the CPU. The optimizer
        must be one that zero=1 takes. Stages on the CPU have all in the host's memory anyway.
    on_failure, max_restarts, on_hang: as those of `Program.group`. "restart" starts a dead worker again, in its place;
        the node that trains then restores all workers from a checkpoint (`Checkpoints.steps`, or `.recovering`).

    Raises:
        PipelineError: the model cannot be cut so, or torch is too old.
        PartitionError: the plan is for another model.
        ScheduleError: the schedule does not exist for these numbers, or is not correct.
    """
    refuse_too_old(torch.__version__)
    stages, microbatches, chunks = as_int(stages), as_int(microbatches), as_int(chunks)
    stages = list(stages) if isinstance(stages, Iterable) and not isinstance(stages, str) else stages  # or an array
    replicas = as_int(replicas)
    replicas = tuple(map(as_int, replicas)) if isinstance(replicas, Iterable) else replicas
    clip_grad_norm = as_float(clip_grad_norm)
    _check(program, model, stages, channel, microbatches, precision, clip_grad_norm, inputs, zero)
    if checks not in CHECKS:
        raise PipelineError(f"checks={checks!r}: must be 'first_step' or 'always'")
    check_recompute("none" if recompute is None else recompute)
    sources = layer_sources(model)
    check_model(model, sources)
    tied = tied_names(sources, model.tied)
    names = model_names(sources, tied)
    place = plan_for(program, group)
    if place is not None:
        stages, replicas = place.plan, 1
        place.compare(program, schedule, recompute, microbatches, resources)
    with errors_of_plan(place, group):
        layout = layout_of(sources, stages, chunks, schedule, microbatches, replicas, recompute)
    edges = tied_edges(tied, layout.cuts) + skip_edges(sources, layout.cuts)
    config = PipelineConfig(
        placement=layout.schedule.placement,
        schedule=layout.name or layout.schedule,
        chunks=layout.chunks,
        microbatches=microbatches,
        loss=model.loss,
        optimizer=model.optimizer,
        lr_scheduler=model.lr_scheduler,
        loss_weight=model.loss_weight,
        seed=model.seed,
        channel=channel,
        credits=sufficient_credits(layout.schedule, edges),
        clip_grad_norm=clip_grad_norm,
        recompute=layout.recompute,
        precision=precision,
        tied=tuple(tied),
        names=names,
        edges=tuple(edges),
        shared_buffers=shared_buffers(sources, layout.cuts) | views(sources),
        replicas=layout.replicas,
        devices=check_devices(device, len(layout.schedule.workers), channel),
        updates=layout.schedule.updates,
        on_nan=on_nan,
        checks=checks,
        predicted_seconds=replica_seconds(layout.plan),
        batch_dims=check_dims(model.batch_dims),
        has_batch_dims=model.batch_dims is not None,
        callbacks=model.callbacks,
        zero=zero if max(layout.replicas) > 1 else 0,  # a single replica has nothing to divide
        is_offloaded=offload is not None,
        registered=None if layout.name is None else registered(layout.name),
    )
    check_on_nan(on_nan, is_asynchronous=config.is_asynchronous)
    if config.is_asynchronous:
        _check_asynchronous(config)
    _check_zero(config, offload)
    with program.group(group, resources=resources, on_failure=on_failure, max_restarts=max_restarts, on_hang=on_hang):
        parts = workers(config, sources, layout.cuts, _owners(model, tied))
        conductor = add_nodes(program, config, parts, inputs, group, layout.plan)
    replicas_by_layer = [layout.replicas_of(layer) for layer in range(len(sources))]
    return PipelineHandle(conductor, replicas_by_layer, is_asynchronous=config.is_asynchronous)


def _check(
    program: Any,
    model: Any,
    stages: Any,
    channel: str,
    microbatches: int,
    precision: str,
    clip_grad_norm: Any,
    inputs: Any,
    zero: Any,
) -> None:
    """Refuse options that are wrong whatever the model is.

    Raises:
        TypeError, PipelineError: the error names the option.
    """
    if not isinstance(program, Program):
        raise TypeError(f"add_pipeline takes an lp.Program first, not {type(program).__name__}")
    if not isinstance(model, Model):
        raise PipelineError(f"add_pipeline takes a pp.Model(layers, loss, optimizer), not {type(model).__name__}")
    if not isinstance(stages, int | Sequence | Plan | None) or isinstance(stages, str | bool):
        raise PipelineError(f"stages={stages!r}: give a whole number (int), a list of cut points, or a plan")
    if inputs is not None and not isinstance(inputs, Handle):
        raise PipelineError(f"inputs={inputs!r}: give the handle of a feeder, program.add_node(lp.CourierNode(Feeder))")
    if not isinstance(channel, str) or channel not in kinds.NAMES:
        raise PipelineError(f"channel={channel!r}: give one of {', '.join(kinds.NAMES)}")
    if not is_count(microbatches):
        raise PipelineError(f"microbatches={microbatches!r}: give a whole number (int) of at least 1")
    if clip_grad_norm is not None and not (isinstance(clip_grad_norm, float) and clip_grad_norm > 0):
        raise PipelineError(f"clip_grad_norm={clip_grad_norm!r}: give a number above 0, or None")
    check_precision(precision)
    if isinstance(zero, bool) or zero not in (0, 1, 2, 3):
        raise PipelineError(f"zero={zero!r}: give 0, 1, 2 or 3")


def _check_asynchronous(config: PipelineConfig) -> None:
    """Refuse options that need all stages at the same version of the weights.

    Raises:
        PipelineError: the error names the option, and what to do.
        ScheduleError: vertical sync of stages with different numbers of replicas.
    """
    _ = config.timings
    refused = {
        "clip_grad_norm": (config.clip_grad_norm is not None, "the gradients of all stages have one norm"),
        "pp.Model(callbacks=…)": (bool(config.callbacks), "some forwards of a step come before the last of another"),
        "precision='fp16'": (config.precision == "fp16", "all stages have one loss scale: take 'bf16'"),
        "tied weights or skips between stages": (bool(config.edges), "the stages are at different versions"),
    }
    for what, (is_asked, why) in refused.items():
        if is_asked:
            raise PipelineError(
                f"{what} with an asynchronous schedule, whose stages update at different times: {why}; or use a "
                "synchronous schedule, such as '1f1b'"
            )


def _check_zero(config: PipelineConfig, offload: Any) -> None:
    """Refuse what replicas that divide their state cannot do.

    Raises:
        NotSupported: the error names the option.
    """
    if offload not in ("cpu", None):
        raise PipelineError(f"offload={offload!r}: give 'cpu', or None")
    option = f"zero={config.zero}" if config.zero else f"offload={offload!r}" if offload else ""
    if option and config.is_asynchronous:
        raise NotSupported(
            f"{option} with an asynchronous schedule, whose stages update after every micro-batch: leave it out, or "
            "use a synchronous schedule, such as '1f1b'"
        )
    if config.zero < 2:
        return
    if len(config.placement) > 1:
        raise NotSupported(
            f"zero={config.zero} with {len(config.placement)} stages: replicas divide gradients and parameters only of "
            "a model in one stage: use stages=1, or zero=1"
        )
    ops = {action.op for action in config.schedule_for(config.microbatches).workers[0]}
    if ops - {"F", "B"}:
        raise NotSupported(
            f"zero={config.zero} with a schedule that splits backwards: use one that does not, such as '1f1b'"
        )
    if config.zero == 3 and config.callbacks:
        raise NotSupported("zero=3 with pp.Model(callbacks=…): the modules' parameters are in shards: use zero=2")


def _owners(model: Model, tied: Sequence[Names]) -> set[int]:
    """Return the layers that decide the initial values of parameters tied to theirs.

    Parameters that are already one object need no such layer.
    """
    named = {name for pair in model.tied for name in pair}
    return {layer_of(names[0]) for names in tied if not named.isdisjoint(names)}


def workers(
    config: PipelineConfig, sources: Sequence[Any], cuts: Sequence[int], owners: set[int]
) -> list[WorkerConfig]:
    """Return the configuration of every rank.

    owners: layers that borrowers of their parameters need too, to begin with the same values.
    """
    parts: list[dict[int, tuple[int, Sequence[Any]]]] = [{} for _ in range(config.workers)]
    bounds = zip([0, *cuts], [*cuts, len(sources)], config.placement, strict=True)
    for stage, (first, end, worker) in enumerate(bounds):
        parts[worker][stage] = (first, sources[first:end])
    borrowed: list[dict[int, Any]] = [{} for _ in parts]
    for edge in config.edges:
        if edge.kind == "tied weights":
            layers = owners & {layer_of(name) for name in edge.names}
            borrowed[config.placement[edge.receiver]].update({layer: sources[layer] for layer in layers})
    places = config.ranks.places
    return [WorkerConfig(rank, parts[worker], borrowed[worker]) for rank, (worker, _) in enumerate(places)]


def add_nodes(
    program: Program,
    config: PipelineConfig,
    workers: Sequence[WorkerConfig],
    inputs: Handle[Any] | None,
    group: str,
    plan: Plan | None,
) -> CourierHandle:
    """Add a node for each rank to the group; return the handle of the first one, which conducts the others."""
    nodes = [CourierNode(Conductor if worker.rank == 0 else StageWorker) for worker in workers]
    handles: list[CourierHandle] = [program.add_node(node, label=group) for node in nodes]
    addresses = [Address("channels") for _ in nodes]
    for address, node in zip(addresses, nodes, strict=True):
        address.assign(node)
    hubs = [ChannelHandle(address, node.name, config.channel) for address, node in zip(addresses, nodes, strict=True)]
    for worker, node, address in zip(workers, nodes, addresses, strict=True):
        neighbours = {receiver: hubs[receiver] for receiver in _receivers(config, worker.rank)}
        owner, replica = config.ranks.places[worker.rank]
        node.notes = notes(plan, owner, replica) if plan is not None else ()
        node.planned_host = planned_host(plan, owner, replica)
        needs_batches = worker.rank == 0 or owner in (config.placement[0], config.placement[-1])
        options: dict[str, Any] = {"feeder": inputs if needs_batches else None}
        if worker.rank == 0:
            options["peers"] = handles[1:]
        node.configure(config, worker, address, neighbours, **options)
    return handles[0]


def _receivers(config: PipelineConfig, rank: int) -> list[int]:
    """Return the ranks that a rank sends to: on its stages' channels, and the other replicas of its worker."""
    channels, ranks = config.channels, config.ranks
    crossing = [channel for channel in range(channels.count) if channels.crosses(channel)]
    routes = [route for channel in crossing for route in ranks.routes(channels, channel)]
    worker, _ = ranks.places[rank]
    return sorted({receiver for sender, receiver in routes if sender == rank} | {*ranks.of(worker)} - {rank})
