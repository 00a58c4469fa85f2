"""Profile of a program's pipeline, on the first micro-batch of its own feeder, without running the program."""

from dataclasses import replace
from typing import Any

from lp_pipe.errors import PipelineError
from lp_pipe.measuring.layer_rounds import Work
from lp_pipe.measuring.profiling import profile_layers
from lp_pipe.nodes import Node
from lp_pipe.pipeline.config import PipelineConfig, WorkerConfig
from lp_pipe.pipeline.layers.batch_dims import marked, unmarked
from lp_pipe.pipeline.layers.microbatches import check_pair, split
from lp_pipe.pipeline.partitioning import Profile
from lp_pipe.program import Program


def profile_program(program: Program, *, group: str | None = None, device: str = "cpu", busy: int = 1) -> Profile:
    """Measure the layers of the program's pipeline, as `profile` does.

    The feeder is built in this process and asked for batch 0. group: of which pipeline, if there are several. busy: as
    in `profile`.

    Raises:
        PipelineError: there is no pipeline, none of that group, or its feeder cannot be asked outside of a run.
    """
    nodes = _workers(program, group)
    config = _part(nodes[0], PipelineConfig)
    layers: dict[int, Any] = {}
    for node in nodes:
        for first, sources in _part(node, WorkerConfig).sources.values():
            layers.update(enumerate(sources, start=first))
    inputs, targets = _batch(program, nodes[0])
    input_dims, target_dims, _ = config.batch_dims
    first = split(marked(inputs, input_dims), config.microbatches)[0]
    sample = unmarked(first), unmarked(split(marked(targets, target_dims), config.microbatches)[0])
    sources = [layers[index] for index in sorted(layers)]
    profile = profile_layers(Work(sources, config.tied, config.loss, config.seed, sample, device), busy)
    return replace(profile, microbatches=config.microbatches)


def _workers(program: Program, group: str | None) -> list[Node[Any]]:
    workers = {label: list(filter(_is_worker, nodes)) for label, nodes in program.groups.items()}
    pipelines = {label: nodes for label, nodes in workers.items() if nodes}
    if not pipelines:
        raise PipelineError(f"{program!r} has no pipeline: it was not given to pp.add_pipeline")
    if group is None and len(pipelines) > 1:
        raise PipelineError(f"{program!r} has several pipelines: name the group of one: {', '.join(pipelines)}")
    if group is not None and group not in pipelines:
        raise PipelineError(
            f"group {group!r} has no pipeline of {program!r}: its pipelines are in groups {', '.join(pipelines)}"
        )
    label = group if group is not None else next(iter(pipelines))
    configs = {id(_part(node, PipelineConfig)) for node in pipelines[label]}
    if len(configs) > 1:
        raise PipelineError(
            f"group {label!r} of {program!r} has the stages of {len(configs)} pipelines: give each a group "
            "of its own, add_pipeline(..., group=...)"
        )
    return pipelines[label]


def _batch(program: Program, conductor: Node[Any]) -> tuple[Any, Any]:
    handle = dict(conductor.launch_parts()).get("argument feeder")
    if handle is None:
        raise PipelineError(
            "the pipeline has no feeder, so there is no sample batch: give add_pipeline(inputs=…), or call pp.profile"
        )
    asked = {address.id for address in handle.addresses}
    for node in program.get_all_nodes():
        if asked & {address.id for address in node.addresses}:
            return _asked(node)
    raise PipelineError(
        f"the feeder, {handle.node_name}, is inside of a colocation: call pp.profile with a sample batch"
    )


def _asked(feeder: Node[Any]) -> tuple[Any, Any]:
    try:
        batch = feeder.construct_apart().batch(0)
    except Exception as error:
        raise PipelineError(
            f"the feeder, {feeder.name}, gives no batch outside of a run ({type(error).__name__}: {error}): call "
            "pp.profile with a sample batch"
        ) from error
    return check_pair(batch, f"the pipeline, from batch(0) of {feeder.name},")


def _is_worker(node: Node[Any]) -> bool:
    """Return whether a node is a stage worker, and not something else that the user put into the group."""
    return any(isinstance(value, PipelineConfig) for _, value in node.launch_parts())


def _part(node: Node[Any], kind: type[Any]) -> Any:
    """Return the argument of that type."""
    return next(value for _, value in node.launch_parts() if isinstance(value, kind))
