"""Measurement of the layers of a model, each as a stage of its own, on one device."""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median, quantiles
from typing import Any

from torch import nn

from lp_pipe.errors import PipelineError
from lp_pipe.measuring.busy import others_busy
from lp_pipe.measuring.layer_rounds import Measured, Work
from lp_pipe.pipeline.layers.model import Model
from lp_pipe.pipeline.layers.model_names import layer_names
from lp_pipe.pipeline.layers.skips import layer_sources
from lp_pipe.pipeline.layers.tied import tied_names
from lp_pipe.pipeline.partitioning import LayerProfile, Profile
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
        bytes_ = list(zip(rounds.peak_bytes(), rounds.stash_bytes(), strict=True))
    names = layer_names(work.sources)
    layers_measured = zip(names, measured, bytes_, rounds.layers, strict=True)
    edges = [(index, index + 1) for index in range(len(names) - 1)] + rounds.skips
    return Profile(
        tuple(_layer_profile(*parts) for parts in layers_measured),
        tuple((names[source], names[reader]) for source, reader in edges) if rounds.skips else None,
    )


def _layer_profile(name: str, taken: Measured, bytes_: tuple[int, int], layer: nn.Module) -> LayerProfile:
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
        peak_bytes=bytes_[0],
        stash_bytes=bytes_[1],
    )


def _spread(seconds: Sequence[float]) -> float:
    """Return the seconds between the first and the third quarter."""
    first, _, third = quantiles(seconds, n=4)
    return third - first
