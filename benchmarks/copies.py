"""The number of copies of large arguments in a node's process: ready-made weights of a stage, a data set of a feeder.

    python -m benchmarks.copies [--megabytes 64] [--quick] [--json FILE]

Each party is launched twice in processes, with large arguments and with small ones. The difference of a process's
resident memory, over the bytes of the large arguments, is how often they exist in it: `kept` while it runs, `peak` at
most (while it loads its arguments). 1 is all there should be of `kept`. Linux only.
"""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from benchmarks.report import machine, show_table, write_json

_STAGES = 2
_LAYERS = 4
_SMALL = 8


def memory_of(modules: Any = None) -> dict[str, int]:
    """Return the bytes that this process has in memory, and the most that it had."""
    status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return {name: int(status[field].split()[0]) * 1024 for name, field in (("kept", "VmRSS"), ("peak", "VmHWM"))}


class Feeder:
    """Holds a data set, as the constructors of feeders do."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def memory(self) -> dict[str, int]:
        return memory_of()


def ready_made(width: int) -> list[Any]:
    return [nn.Linear(width, width, bias=False) for _ in range(_LAYERS)]


def factories(width: int) -> list[Any]:
    return [pp.Layer(nn.Linear, width, width, bias=False) for _ in range(_LAYERS)]


def split(width: int) -> list[Any]:
    model = nn.Sequential(*ready_made(width))
    return pp.split(model, torch.zeros(4, width), [str(index) for index in range(1, _LAYERS)])


def of_stages(layers: Callable[[int], list[Any]], width: int, **options: Any) -> list[dict[str, int]]:
    """Return the memory of each stage worker's process."""
    program = lp.Program("copies")
    model = pp.Model(layers(width), nn.functional.mse_loss, lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
    handle = pp.add_pipeline(program, model, stages=_STAGES, microbatches=2, **options)
    with lp.launch(program, "process") as run:
        return run.client(handle).apply(memory_of)


def of_feeder(data: Any) -> list[dict[str, int]]:
    """Return the memory of a feeder's process."""
    program = lp.Program("copies")
    handle = program.add_node(lp.CourierNode(Feeder, data), label="feeder")
    with lp.launch(program, "process") as run:
        return [run.client(handle).memory()]


PARTIES: dict[str, Callable[[int], list[dict[str, int]]]] = {
    "ready-made layers": lambda width: of_stages(ready_made, width),
    "ready-made, two virtual stages": lambda width: of_stages(ready_made, width, schedule="interleaved"),
    "pp.split": lambda width: of_stages(split, width),
    "pp.Layer factories": lambda width: of_stages(factories, width),
    "feeder of tensors": lambda width: of_feeder([torch.ones(width, width) for _ in range(_LAYERS // _STAGES)]),
    "feeder of arrays": lambda width: of_feeder([np.ones((width, width), "f4") for _ in range(_LAYERS // _STAGES)]),
}


def figures_of(party: Callable[[int], list[dict[str, int]]], width: int) -> dict[str, list[float]]:
    """Return for each process of a party how often its large arguments exist in it."""
    large, small = party(width), party(_SMALL)
    size = _LAYERS // _STAGES * (width**2 - _SMALL**2) * 4
    return {
        name: [(one[name] - other[name]) / size for one, other in zip(large, small, strict=True)]
        for name in ("kept", "peak")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64, help="of each layer, or part of the data set")
    parser.add_argument("--quick", action="store_true", help="small layers: only to see that it works")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    width = int((options.megabytes * 2**20 / 4) ** 0.5) if not options.quick else 512
    parties = {name: figures_of(party, width) for name, party in PARTIES.items()}
    show_table(
        f"copies of {_LAYERS // _STAGES} x {4 * width**2 / 2**20:.0f} MiB in each process",
        ["arguments", "kept", "peak"],
        [
            [name, *(" ".join(f"{copies:.2f}" for copies in figures[column]) for column in ("kept", "peak"))]
            for name, figures in parties.items()
        ],
    )
    figures = {
        "benchmark": "copies",
        "machine": {**machine(), "torch": torch.__version__},
        "settings": {"width": width, "layers": _LAYERS, "stages": _STAGES, "mode": "process"},
        "parties": parties,
    }
    write_json(figures, options.json)


if __name__ == "__main__":
    main()
