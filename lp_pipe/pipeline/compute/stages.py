"""A worker's stages, built from what the program says of them."""

import torch

from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.config import PipelineConfig, WorkerConfig
from lp_pipe.pipeline.layers.build import are_exclusive, build_layers
from lp_pipe.pipeline.layers.tied import tie


def stages_of(
    worker: WorkerConfig, pipeline: PipelineConfig, device: torch.device, *, owns_sources: bool
) -> dict[int, Stage]:
    """Build a worker's stages; returns them by their numbers, in order.

    owns_sources: ready-made modules were unpickled for this worker alone, so that they need not be copied.
    """
    stages = {}
    for index, (first, sources) in sorted(worker.sources.items()):
        layers = build_layers(sources, first, pipeline.seed, adopt=owns_sources and are_exclusive(sources))
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
            is_asynchronous=pipeline.is_asynchronous,
        )
    return stages
