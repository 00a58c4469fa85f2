"""Measurement of the layers of a model, each as a stage of its own, on one device."""

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from statistics import median, quantiles
from typing import Any

from torch import nn

from lp_pipe.context import context, stop_event
from lp_pipe.errors import NodeError, PipelineError, Unavailable
from lp_pipe.launch import launch
from lp_pipe.measuring.layer_rounds import Measured, Work
from lp_pipe.nodes import CourierNode, Node
from lp_pipe.pipeline.config import PipelineConfig, WorkerConfig
from lp_pipe.pipeline.layers.batch_dims import marked, unmarked
from lp_pipe.pipeline.layers.microbatches import check_pair, split
from lp_pipe.pipeline.layers.model import Model
from lp_pipe.pipeline.layers.model_names import layer_names
from lp_pipe.pipeline.layers.skips import layer_sources
from lp_pipe.pipeline.layers.tied import tied_names
from lp_pipe.pipeline.partitioning import LayerProfile, Profile
from lp_pipe.program import Program
from lp_pipe.resources import Resources
from lp_pipe.training.device import check_devices, choose_device, computing_with

_LEAST_ROUNDS = 5
_MOST_ROUNDS = 50
_SECONDS = 2.0  # for all rounds together, once there are enough for a median


def profile(model: Model, sample_input: Any, sample_target: Any, *, device: str = "cpu", busy: int = 1) -> Profile:
    """Train copies of the model's layers on the sample, one micro-batch, for some seconds after a warm-up.

    On a CPU one thread computes, as in a stage that has not asked for more. The loss counts as part of the last layer.
    A backward is timed as a whole, and its part for the parameters is that of a split backward. A value that a Stash
    sets aside counts with its layer's output, and passes all boundaries up to its Pop.

    busy: how many processes do this at a time, of which this one is measured. Stages on one host share its caches and
    the bandwidth of its memory: with as many as there are stages, and at least a core for each, times are those of
    stages that compute at once. They are launched for it, and end with it, so that the model must pickle.

    Raises:
        PipelineError: the model cannot be built, there is no such device, or the other processes have not kept busy.
        SerializationError: with busy, the model or the sample does not pickle.
    """
    if not isinstance(model, Model):
        raise PipelineError(f"profile takes a pp.Model(layers, loss, optimizer), not {type(model).__name__}")
    sources = layer_sources(model)
    tied = tied_names(sources, model.tied)
    return profile_layers(Work(sources, tied, model.loss, model.seed, (sample_input, sample_target), device), busy)


def profile_layers(work: Work, busy: int = 1) -> Profile:
    """Measure the layers of the work, as `profile` does."""
    (name,) = check_devices(work.device, 1)
    work = replace(work, device=str(choose_device(name, 0)))
    rounds = work.rounds()
    with others_busy(work, busy - 1), computing_with(Resources().threads):
        rounds.warm_up()
        started = time.perf_counter()
        for count in range(_MOST_ROUNDS):
            if count >= _LEAST_ROUNDS and time.perf_counter() - started > _SECONDS:
                break
            rounds.run()
    measured = rounds.measured
    with computing_with(Resources().threads):
        counted = list(zip(rounds.peak_bytes(), rounds.stash_bytes(), rounds.flops(), strict=True))
    names = layer_names(work.sources)
    layers_measured = zip(names, measured, counted, rounds.layers, strict=True)
    edges = [(index, index + 1) for index in range(len(names) - 1)] + rounds.skips
    return Profile(
        tuple(_layer_profile(*parts) for parts in layers_measured),
        tuple((names[source], names[reader]) for source, reader in edges) if rounds.skips else None,
    )


def _layer_profile(
    name: str, taken: Measured, counted: tuple[int, int, tuple[int, int]], layer: nn.Module
) -> LayerProfile:
    peak_bytes, stash_bytes, (flops, backward_flops) = counted
    backward, weight = median(taken.backward), median(taken.backward_weight)
    parts = median(taken.backward_input) + weight
    return LayerProfile(
        name,
        forward_s=median(taken.forward),
        backward_s=backward,
        activation_bytes=taken.activation_bytes,
        parameter_bytes=sum(parameter.nbytes for parameter in layer.parameters()),
        # The two parts take longer than a whole backward does, so only their shares of it count.
        backward_weight_s=backward * weight / parts if parts else 0.0,
        forward_spread_s=_spread(taken.forward),
        backward_spread_s=_spread(taken.backward),
        peak_bytes=peak_bytes,
        stash_bytes=stash_bytes,
        flops=flops,
        backward_flops=backward_flops,
    )


def _spread(seconds: Sequence[float]) -> float:
    """Return the seconds between the first and the third quarter."""
    first, _, third = quantiles(seconds, n=4)
    return third - first


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


_LIMIT_S = 600.0  # after which they end, even if the process that waits for them does not
_PATIENCE_S = 10.0  # until the launcher knows why a process does not answer any more


@contextmanager
def others_busy(work: Work, count: int, limit_s: float = _LIMIT_S) -> Iterator[None]:
    """Let `count` other processes do the same work, each for itself, while the body runs.

    They are warm when the body begins, and nothing is left of them when the block ends, however it ends. At
    its end it is known whether they have kept busy.

    Raises:
        PipelineError: count is below 0; or they have failed, or worked for longer than limit_s.
        SerializationError: the work does not pickle.
    """
    if count < 0:
        raise PipelineError(f"busy={count + 1}: must be at least 1: this process is the first")
    if count == 0:
        yield
        return
    program = Program("profile_busy")
    with program.group("busy"):
        handles = [program.add_node(CourierNode(Busy, work, limit_s)) for _ in range(count)]
    with (
        tempfile.TemporaryDirectory(prefix="lp-profile-") as run_dir,
        _explained(limit_s),
        launch(program, "process", run_dir=run_dir, hang_after=None) as run,
    ):
        others = [run.client(handle) for handle in handles]
        try:
            for other in others:
                other.rounds_done()
            yield
            for other in others:
                other.rounds_done()
        except Unavailable:
            with suppress(TimeoutError):
                run.wait(_PATIENCE_S)  # raises the first failure, as soon as the launcher knows it
            raise


class Busy:
    """A node that trains copies of the layers until its program stops."""

    def __init__(self, work: Work, limit_s: float) -> None:
        self._work = work
        self._limit_s = limit_s
        self._is_warm = threading.Event()
        self._rounds_done = 0

    def run(self) -> None:
        """Train for limit_s at most."""
        ends = time.monotonic() + self._limit_s
        is_stopping = stop_event()
        with computing_with(context().resources.threads):
            rounds = self._work.rounds()
            rounds.warm_up()
            self._is_warm.set()
            while not is_stopping.is_set() and time.monotonic() < ends:
                rounds.run()
                self._rounds_done += 1

    def rounds_done(self) -> int:
        """Return how many rounds are done so far, once they have begun."""
        self._is_warm.wait()
        return self._rounds_done


@contextmanager
def _explained(limit_s: float) -> Iterator[None]:
    try:
        yield
    except NodeError as error:
        raise PipelineError(f"the processes that compute beside the profile (busy=) have failed: {error}") from error
    except Unavailable as error:
        raise PipelineError(
            f"the processes that compute beside the profile (busy=) have ended before it did, perhaps after their "
            f"limit of {limit_s:g} s: profile a smaller micro-batch"
        ) from error
