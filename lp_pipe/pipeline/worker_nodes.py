"""The nodes of a pipeline: one for each process of a stage worker, which is told what it has and whom it speaks to."""

from collections.abc import Sequence
from typing import Any

from lp_pipe.address import Address
from lp_pipe.handles import CourierHandle, Handle
from lp_pipe.nodes import CourierNode
from lp_pipe.pipeline.conductor.conductor import Conductor
from lp_pipe.pipeline.config import PipelineConfig, WorkerConfig
from lp_pipe.pipeline.layers.tied import layer_of
from lp_pipe.pipeline.partitioning.plan import Plan
from lp_pipe.pipeline.planned import notes, planned_host
from lp_pipe.pipeline.worker.channel_handle import ChannelHandle
from lp_pipe.pipeline.worker.worker import StageWorker
from lp_pipe.program import Program


def workers(
    config: PipelineConfig, sources: Sequence[Any], cuts: Sequence[int], owners: set[int]
) -> list[WorkerConfig]:
    """By rank. owners: layers that also borrowers of their parameters must have, to begin with the same ones."""
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
    """Add one for each rank to the group; returns the first one's handle, which conducts the others."""
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
    """The ranks that a rank sends to: on its stages' channels, and the other replicas of its worker."""
    channels, ranks = config.channels, config.ranks
    crossing = [channel for channel in range(channels.count) if channels.crosses(channel)]
    routes = [route for channel in crossing for route in ranks.routes(channels, channel)]
    worker, _ = ranks.places[rank]
    return sorted({receiver for sender, receiver in routes if sender == rank} | {*ranks.of(worker)} - {rank})
