"""Cut points between the layers of a model. Needs no torch."""

import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise

from lp_pipe.errors import PipelineError


def balanced_cuts(weights: Sequence[float], stages: int, chunks: int = 1) -> list[int]:
    """Return cut points that make the heaviest of `stages` consecutive, non-empty runs as light as possible.

    A cut point is the index of a stage's first layer; there are stages - 1. The method is exact: dynamic programming
    over (number of stages, layers so far). Among equal optima the earlier cuts win.

    chunks: how many of the stages each worker has, for the error.

    Raises:
        PipelineError: there are fewer layers than stages.
    """
    layers = len(weights)
    if not 1 <= stages <= layers:
        raise PipelineError(f"cannot cut {layers} layers into {stages} stages{_what_can_be(layers, stages, chunks)}")
    total = [0.0, *accumulate(float(weight) for weight in weights)]
    # best[k][n]: the lightest possible heaviest run when the first n layers are cut into k + 1 runs
    best = [[total[n] for n in range(layers + 1)]]
    last_cut: list[list[int]] = [[0] * (layers + 1)]
    for k in range(1, stages):
        row, cut_row = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for n in range(k + 1, layers + 1):
            for cut in range(k, n):
                heaviest = max(best[k - 1][cut], total[n] - total[cut])
                if heaviest < row[n]:
                    row[n], cut_row[n] = heaviest, cut
        best.append(row)
        last_cut.append(cut_row)
    cuts: list[int] = []
    end = layers
    for k in range(stages - 1, 0, -1):
        end = last_cut[k][end]
        cuts.append(end)
    return cuts[::-1]


def _what_can_be(layers: int, stages: int, chunks: int) -> str:
    if chunks == 1:
        return f": ask for 1 to {layers} stages, or split a layer"
    # Users give a number of workers, which add_pipeline calls stages.
    fewer = f"stages={layers // chunks} or fewer, " if layers >= chunks else ""
    return (
        f", {chunks} for each of {stages // chunks} workers: "
        f"ask for {fewer}a schedule with fewer chunks, or split a layer"
    )


def stage_of(layer: int, cuts: Sequence[int]) -> int:
    """Return the stage that has a layer."""
    return sum(cut <= layer for cut in cuts)


def check_cuts(cuts: Sequence[int], layers: int) -> list[int]:
    """Return the cut points as a list if every stage gets at least one layer.

    Raises:
        PipelineError: they are not increasing, outside 1 … layers - 1, or no whole numbers.
    """
    try:
        points = [0, *map(operator.index, cuts), layers]
    except TypeError as error:
        raise PipelineError(f"cut points {list(cuts)} must be whole numbers (int)") from error
    if any(later <= earlier for earlier, later in pairwise(points)):
        raise PipelineError(
            f"cut points {list(cuts)} must increase and lie between 1 and {layers - 1}: "
            "each is the index of a later stage's first layer, not a number of layers"
        )
    return points[1:-1]
