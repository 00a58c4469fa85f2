"""The devices that a plan is for, and the links between them. Needs no torch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lp_pipe.errors import PartitionError
from lp_pipe.pipeline.partitioning.fields import (
    check_keys,
    checked_count,
    checked_number,
    in_file,
    read_toml,
    toml_string,
    write_text,
)


@dataclass(frozen=True)
class Level:
    """A number of things of the level below (devices, on the first) that are linked to each other.

    bandwidth: bytes per second of each one's link. latency: seconds a message takes besides. speeds: of each device, on
    the first level: 1 is that of the profiled one, 0.5 takes twice as long; None: all have 1.
    """

    name: str
    count: int
    bandwidth: float
    latency: float = 0.0
    speeds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.speeds, list):
            object.__setattr__(self, "speeds", tuple(self.speeds))


@dataclass(frozen=True)
class Topology:
    """The levels from the innermost outwards: devices of a host, hosts of a rack.

    memory: bytes of each device.

    Raises:
        PartitionError: a level has no devices, or no bandwidth; names the field.
    """

    levels: tuple[Level, ...]
    memory: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        if not self.levels:
            raise PartitionError("topology: levels is empty: give at least one Level")
        for place, level in enumerate(self.levels):
            at = f"topology: levels[{place}]"
            if not isinstance(level.name, str) or not level.name:
                raise PartitionError(f"{at}.name: must be a text, not {level.name!r}")
            checked_count(level.count, f"{at}.count (level {level.name!r})")
            checked_number(level.bandwidth, f"{at}.bandwidth (level {level.name!r})", above_zero=True)
            checked_number(level.latency, f"{at}.latency (level {level.name!r})")
            _check_speeds(level, place, at)
        if self.memory is not None:
            checked_number(self.memory, "topology: memory", above_zero=True)

    @property
    def devices(self) -> int:
        """Return the number of devices of all levels."""
        return math.prod(level.count for level in self.levels)

    def save(self, path: str | Path) -> None:
        """Write the topology as TOML."""
        lines = [] if self.memory is None else [f"memory = {self.memory!r}  # bytes of each device", ""]
        for level in self.levels:
            lines += ["[[levels]]", f"name = {toml_string(level.name)}", f"count = {level.count}"]
            lines += [f"bandwidth = {level.bandwidth!r}  # bytes/s", f"latency = {level.latency!r}  # seconds"]
            if level.speeds is not None:
                lines.append(f"speeds = {list(level.speeds)}  # of each device; 1 is that of the profiled one")
            lines.append("")
        write_text(path, "\n".join(lines))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read `memory = …` and, innermost first, `[[levels]]` with name, count, bandwidth, latency and speeds.

        Raises:
            PartitionError: it is not such a file; names the file and the field.
        """
        table = read_toml(path)
        check_keys(table, required=("levels",), optional=("memory",), where=str(path))
        if not isinstance(table["levels"], list):
            raise PartitionError(f"{path}: levels: write each level as [[levels]]")
        for place, level in enumerate(table["levels"]):
            keys = ("name", "count", "bandwidth")
            check_keys(level, required=keys, optional=("latency", "speeds"), where=f"{path}: levels[{place}]")
        with in_file(path, "topology"):
            return cls(tuple(Level(**level) for level in table["levels"]), table.get("memory"))


def _check_speeds(level: Level, place: int, at: str) -> None:
    if level.speeds is None:
        return
    if place:
        raise PartitionError(f"{at}.speeds (level {level.name!r}): only the devices of the first level have speeds")
    if not isinstance(level.speeds, tuple) or len(level.speeds) != level.count:
        raise PartitionError(
            f"{at}.speeds (level {level.name!r}): a list of {level.count} numbers is needed, one for each device, not "
            f"{list(level.speeds) if isinstance(level.speeds, tuple) else level.speeds!r}"
        )
    for device, speed in enumerate(level.speeds):
        checked_number(speed, f"{at}.speeds[{device}] (level {level.name!r})", above_zero=True)
