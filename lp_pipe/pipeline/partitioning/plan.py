"""Plans, which are what `partition` returns: stages, layers by name, replicas and predicted times. Needs no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from lp_pipe.errors import PartitionError
from lp_pipe.pipeline.partitioning.fields import (
    check_keys,
    checked_count,
    checked_number,
    read_toml,
    toml_string,
    write_text,
)

_SECONDS = ("predicted_seconds", "boundary_seconds")
_OF_A_STAGE = (*_SECONDS, "recompute", "devices", "hosts")
_TEXTS = ("reason", "warning", "schedule")
_OPTIONAL = ("slowest_seconds", "proven_gap", *_TEXTS, "runners_up", "microbatches", "step_seconds")


@dataclass(frozen=True)
class PlannedStage:
    """A stage of a plan.

    predicted_seconds: compute and all-reduce per micro-batch. boundary_seconds: of the busier of its two sides.
    recompute: "none" or "full", which keeps its inputs only; None: the plan does not say.
    devices: which ones of the topology, by their place in its `speeds`; empty where they are all alike.
    hosts: of each replica, by name or by place among the hosts of a launch, from 0; empty: wherever there is room.
    """

    layers: tuple[str, ...]
    replicas: int
    predicted_seconds: float
    boundary_seconds: float = 0.0
    recompute: str | None = None
    devices: tuple[int, ...] = ()
    hosts: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Stages in order, and what they are predicted to take.

    slowest_seconds: of the slowest stage or side of a boundary, which a micro-batch takes at least.
    proven_gap: by what share the best plan may be faster at most; 0 where this is the best.
    reason: why this plan, in words. runners_up: what else was considered, the fastest first.
    schedule: which one its stages fit in memory with; None: the plan does not say. step_seconds: what a step of so many
    micro-batches takes with it, the bubble included. warning: which stage is too short to be worth its cut, if any.
    """

    stages: tuple[PlannedStage, ...]
    slowest_seconds: float
    proven_gap: float = 0.0
    reason: str = ""
    runners_up: "tuple[Plan, ...]" = ()
    schedule: str | None = None
    microbatches: int | None = None
    step_seconds: float | None = None
    warning: str = ""

    @property
    def devices(self) -> int:
        """Return how many devices the plan uses."""
        return sum(stage.replicas for stage in self.stages)

    def cuts(self, layer_names: Sequence[str]) -> list[int]:
        """Return where a model with these layers, in this order, is cut: the index of each later stage's first layer.

        Raises:
            PartitionError: the plan is for another model, or its stages are not consecutive layers of this one.
        """
        planned = [name for stage in self.stages for name in stage.layers]
        missing = [name for name in layer_names if name not in {*planned}]
        unknown = [name for name in planned if name not in {*layer_names}]
        if missing or unknown:
            raise PartitionError(
                f"the plan is for another model: {_difference(planned, layer_names, missing, unknown)}"
            )
        ends = list(accumulate(len(stage.layers) for stage in self.stages))
        for stage, (planned_stage, end) in enumerate(zip(self.stages, ends, strict=True)):
            expected = layer_names[end - len(planned_stage.layers) : end]
            stray = [name for name in planned_stage.layers if name not in expected]
            if stray:
                raise PartitionError(
                    f"stage {stage} of the plan has {stray[0]!r}, which is elsewhere in the model: stages must be "
                    "consecutive layers of the model"
                )
        return ends[:-1]

    def save(self, path: str | Path) -> None:
        """Write the plan as TOML that people can read and edit."""
        write_text(path, "\n".join(_lines(self, "")))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read such a file, of which only `[[stages]]` with layers and replicas is needed.

        Raises:
            PartitionError: it is not such a file; names the file and the field.
        """
        return cls._read(read_toml(path), str(path))

    @classmethod
    def _read(cls, table: Any, where: str) -> Self:
        check_keys(table, required=("stages",), optional=_OPTIONAL, where=where)
        stages = [_stage(stage, f"{where}: stages[{i}]") for i, stage in enumerate(_tables(table, "stages", where))]
        if not stages:
            raise PartitionError(f"{where}: stages is empty: a plan needs at least one stage")
        names = [name for stage in stages for name in stage.layers]
        twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
        if twice is not None:
            raise PartitionError(f"{where}: stages: layer {twice!r} occurs twice")
        for key in _TEXTS:
            if not isinstance(table.get(key, ""), str):
                raise PartitionError(f"{where}: {key}: must be text, not {table[key]!r}")
        slowest = max(max(stage.predicted_seconds, stage.boundary_seconds) for stage in stages)
        others = [
            cls._read(other, f"{where}: runners_up[{i}]") for i, other in enumerate(_tables(table, "runners_up", where))
        ]
        return cls(
            tuple(stages),
            checked_number(table.get("slowest_seconds", slowest), f"{where}: slowest_seconds"),
            checked_number(table.get("proven_gap", 0.0), f"{where}: proven_gap"),
            table.get("reason", ""),
            tuple(others),
            table.get("schedule"),
            checked_count(table["microbatches"], f"{where}: microbatches") if "microbatches" in table else None,
            checked_number(table["step_seconds"], f"{where}: step_seconds") if "step_seconds" in table else None,
            table.get("warning", ""),
        )


def _lines(plan: Plan, prefix: str) -> Iterator[str]:
    yield f"slowest_seconds = {plan.slowest_seconds!r}  # of a stage or a boundary, per micro-batch"
    yield f"proven_gap = {plan.proven_gap!r}  # the best plan is faster by this share at most"
    yield f"reason = {toml_string(plan.reason)}"
    if plan.warning:
        yield f"warning = {toml_string(plan.warning)}"
    if plan.schedule is not None:
        yield f"schedule = {toml_string(plan.schedule)}"
    if plan.microbatches is not None:
        yield f"microbatches = {plan.microbatches}"
    if plan.step_seconds is not None:
        yield f"step_seconds = {plan.step_seconds!r}  # of so many micro-batches, with the schedule's bubble"
    for index, stage in enumerate(plan.stages):
        yield ""
        yield f"[[{prefix}stages]]  # stage {index}"
        yield f"replicas = {stage.replicas}"
        yield f"predicted_seconds = {stage.predicted_seconds!r}"
        yield f"boundary_seconds = {stage.boundary_seconds!r}"
        if stage.recompute is not None:
            yield f"recompute = {toml_string(stage.recompute)}"
        if stage.devices:
            yield f"devices = {list(stage.devices)}"
        if stage.hosts:
            names = ", ".join(toml_string(host) if isinstance(host, str) else str(host) for host in stage.hosts)
            yield f"hosts = [{names}]  # of each replica: a name, or its place among the hosts of the launch, from 0"
        yield "layers = ["
        yield from (f"    {toml_string(name)}," for name in stage.layers)
        yield "]"
    for other in plan.runners_up:
        yield ""
        yield f"[[{prefix}runners_up]]"
        yield from _lines(other, f"{prefix}runners_up.")
    if not prefix:
        yield ""


def _stage(table: Any, where: str) -> PlannedStage:
    check_keys(table, required=("layers", "replicas"), optional=_OF_A_STAGE, where=where)
    layers = table["layers"]
    if not isinstance(layers, list) or not layers or not all(isinstance(name, str) for name in layers):
        raise PartitionError(f"{where}: layers: must be a list of at least one layer name, not {layers!r}")
    seconds = {key: checked_number(table.get(key, 0.0), f"{where}: {key}") for key in _SECONDS}
    recompute = table.get("recompute")
    if recompute not in (None, "none", "full"):
        raise PartitionError(f"{where}: recompute: must be 'none' or 'full', not {recompute!r}")
    replicas = checked_count(table["replicas"], f"{where}: replicas")
    return PlannedStage(
        tuple(layers),
        replicas,
        **seconds,
        recompute=recompute,
        devices=_one_each(table, "devices", _is_device, "whole numbers of at least 0", replicas, where),
        hosts=_one_each(table, "hosts", _is_host, "names, or whole numbers of at least 0", replicas, where),
    )


def _one_each(
    table: dict[str, Any], key: str, is_valid: Callable[[Any], bool], what: str, replicas: int, where: str
) -> tuple[Any, ...]:
    """Return the list under `key`, which has a value for each replica, or is empty."""
    found = table.get(key, [])
    if not isinstance(found, list) or not all(map(is_valid, found)):
        raise PartitionError(f"{where}: {key}: must be a list of {what}, not {found!r}")
    if len(found) not in (0, replicas):
        raise PartitionError(f"{where}: {key}: must name one for each of {replicas} replicas, not {len(found)}")
    return tuple(found)


def _is_device(device: Any) -> bool:
    return type(device) is int and device >= 0


def _is_host(host: Any) -> bool:
    return host != "" if isinstance(host, str) else _is_device(host)


def _tables(table: dict[str, Any], key: str, where: str) -> list[Any]:
    tables = table.get(key, [])
    if not isinstance(tables, list):
        raise PartitionError(f"{where}: {key}: must be tables, each written as [[{key}]]")
    return tables


def _difference(planned: Sequence[str], names: Sequence[str], missing: Sequence[str], unknown: Sequence[str]) -> str:
    parts = [f"it has {len(planned)} layers, the model {len(names)}"]
    if unknown:
        parts.append(f"the model has no layer {unknown[0]!r}")
    if missing:
        parts.append(f"the plan has no layer {missing[0]!r}")
    return "; ".join(parts)
