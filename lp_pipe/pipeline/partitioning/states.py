"""The states between stages: the sets of layers that may already be done, as a lattice.

A set is predecessor-closed: with a layer it has all that the layer reads. Of a chain these are the prefixes. Of a DAG
each is told by its last layers, an antichain:

    a -> b -> d        {} {a} {a,b} {a,c} {a,b,c} {a,b,c,d}; {a,b} to {a,b,c} is the stage {c}
      \\-> c -/

Source: PipeDream's optimizer (SOSP 2019), with antichains as states; here all sources are explored, and a tensor that
crosses a boundary counts once, however many layers read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lp_pipe.pipeline.partitioning.profile import Profile

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class States:
    """The sets, smaller ones first: the first is empty, the last has all layers.

    members[state, layer]; compute, its part forward, parameters, activations (kept for backwards): of all layers in the
    set; crossing: bytes of the tensors that layers outside of the set read. within[s, t]: s is a proper part of t, so
    that t without s may be a stage. is_complete: False where there are too many sets, and these are the prefixes of one
    order. recomputes_all: compute has each forward twice.
    """

    members: Bools
    compute: Floats
    forward: Floats
    parameters: Floats
    activations: Floats
    crossing: Floats
    within: Bools
    is_complete: bool
    recomputes_all: bool = False

    @property
    def count(self) -> int:
        return len(self.members)

    @property
    def is_chain(self) -> bool:
        """Return whether each set is within the next."""
        return bool(np.diagonal(self.within, 1).all())

    def only(self, kept: Sequence[int]) -> "States":
        """Return fewer places to cut: the first, the last, and any between."""
        keep = np.array(kept)
        return States(
            self.members[keep],
            self.compute[keep],
            self.forward[keep],
            self.parameters[keep],
            self.activations[keep],
            self.crossing[keep],
            self.within[np.ix_(keep, keep)],
            is_complete=False,
            recomputes_all=self.recomputes_all,
        )

    def seconds(self, start: int, end: int, is_recomputed: bool) -> tuple[float, float]:
        """Return the seconds of the stage between two states: of its forward, and of all of its compute."""
        forward = max(0.0, float(self.forward[end] - self.forward[start]))
        once_more = forward if is_recomputed and not self.recomputes_all else 0.0
        return forward, max(0.0, float(self.compute[end] - self.compute[start])) + once_more

    def layers(self, start: int, end: int) -> list[int]:
        """Return the layers of the stage between two states."""
        return [int(layer) for layer in np.flatnonzero(self.members[end] & ~self.members[start])]


def states_of(profile: Profile, recompute: str, limit: int) -> States:
    """Return all states of the profile, or, of more than `limit`, the prefixes of one order of the layers."""
    sets = _closed_sets(profile, max(limit, len(profile.layers) + 1))
    is_complete = sets is not None
    members = _members(sets if sets is not None else _prefixes(profile.order()), len(profile.layers))
    layers = profile.layers
    times = [layer.forward_s * (2 if recompute == "full" else 1) + layer.backward_s for layer in layers]
    parameters = [layer.parameter_bytes for layer in layers]
    outputs = [layer.activation_bytes for layer in layers]
    kept = [layer.kept_bytes for layer in layers]
    numbers = members.astype(np.float64)
    return States(
        members,
        compute=numbers @ np.array(times, dtype=np.float64),
        forward=numbers @ np.array([layer.forward_s for layer in layers], dtype=np.float64),
        parameters=numbers @ np.array(parameters, dtype=np.float64),
        activations=numbers @ np.array(kept, dtype=np.float64),
        crossing=_crossing(members, profile.links, np.array(outputs, dtype=np.float64)),
        within=_within(members),
        is_complete=is_complete,
        recomputes_all=recompute == "full",
    )


def _closed_sets(profile: Profile, limit: int) -> list[int] | None:
    """Return the sets as bit masks, by size; None when there are more than `limit`."""
    needs = [0] * len(profile.layers)
    for source, reader in profile.links:
        needs[reader] |= 1 << source
    sets: list[int] = [0]
    frontier = [0]
    for _ in profile.layers:
        larger: dict[int, None] = {}  # a dict, as a set that keeps its order
        for done in frontier:
            for layer, need in enumerate(needs):
                if not done >> layer & 1 and need & ~done == 0:
                    larger[done | 1 << layer] = None
            if len(sets) + len(larger) > limit:
                return None
        frontier = list(larger)
        sets += frontier
    return sets


def _prefixes(order: Sequence[int]) -> list[int]:
    sets = [0]
    for layer in order:
        sets.append(sets[-1] | 1 << layer)
    return sets


def _members(sets: Sequence[int], layers: int) -> Bools:
    size = (layers + 7) // 8
    packed = np.frombuffer(b"".join(done.to_bytes(size, "little") for done in sets), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(sets), size), axis=1, count=layers, bitorder="little")
    return bits.astype(np.bool_)


def _crossing(members: Bools, links: Sequence[tuple[int, int]], activations: Floats) -> Floats:
    """Return the bytes that cross: each tensor once, if any of its readers is still to come."""
    awaited = np.zeros_like(members)
    for source, reader in links:
        awaited[:, source] |= members[:, source] & ~members[:, reader]
    crossing: Floats = awaited.astype(np.float64) @ activations
    return crossing


def _within(members: Bools) -> Bools:
    inside = members.astype(np.float32)
    left_over = inside @ (1 - inside).T  # layers of s that t does not have
    sizes = members.sum(axis=1)
    within: Bools = (left_over == 0) & (sizes[:, None] < sizes[None, :])
    return within
