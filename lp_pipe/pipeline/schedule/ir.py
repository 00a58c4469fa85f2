"""The data of a schedule: for each worker, the list of its actions."""

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.updates import Updates
from lp_pipe.telemetry.file_writing import write_atomically

Op = Literal["F", "B", "I", "W"]
WORDS: dict[Op, str] = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}

# The cells of torch.distributed.pipelining (up to 2.15): `_Action.__repr__`.
_COMPUTE = re.compile(r"(\d{1,18})([FBIW])(\d{1,18})")
_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|(WAIT_)?(REDUCE_GRAD|SEND_F|SEND_B)|RECV_F|RECV_B)\d*")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_SHOWN = 40  # characters of a cell that errors show


class Action(NamedTuple):
    """A piece of computation of one stage on one micro-batch.

    op: "F" forward, "B" full backward, "I" backward for the inputs, "W" for the weights.
    A named tuple, not a dataclass: large schedules hold millions of them.
    """

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the action that str() has written so; None for other text."""
        match = _COMPUTE.fullmatch(text)
        return cls(cast(Op, match[2]), int(match[1]), int(match[3])) if match is not None else None


# No slots: what is derived from the actions is kept in the instance's dict.
@dataclass(frozen=True)
class Schedule:
    """The order in which each worker runs its actions; sends, receives and the step follow from it.

    updates: when an asynchronous schedule updates weights; None: once, when a step's gradients are all there.
    Whether it works is what `verify` checks, and not its construction.

    Raises:
        ScheduleError: something in it is no Action.
    """

    name: str
    workers: tuple[tuple[Action, ...], ...]
    updates: Updates | None = None

    def __post_init__(self) -> None:
        workers = tuple(_actions(self.name, worker, listed) for worker, listed in enumerate(self.workers))
        object.__setattr__(self, "workers", workers)

    @property
    def stages(self) -> int:
        """Return the number of virtual stages, over all workers."""
        return len(self.placement)

    @cached_property
    def microbatches(self) -> int:
        """Return how many there are, by the largest number in an action; 0 without actions."""
        return 1 + max((action.microbatch for actions in self.workers for action in actions), default=-1)

    @cached_property
    def forward_only(self) -> bool:
        """Return whether the schedule evaluates, and does not train."""
        return all(action.op == "F" for actions in self.workers for action in actions)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Return the worker of each virtual stage.

        Raises:
            ScheduleError: a stage is on two workers, or on none.
        """
        owners: dict[int, int] = {}
        for worker, actions in enumerate(self.workers):
            for stage in sorted({action.stage for action in actions}):
                if owners.setdefault(stage, worker) != worker:
                    raise ScheduleError(_two_owners(self, stage))
        for stage, worker in owners.items():
            if not 0 <= stage < len(owners):
                raise ScheduleError(_out_of_range(self, stage, worker, len(owners)))
        return tuple(owners[stage] for stage in range(len(owners)))

    def first_microbatches(self, count: int) -> Self:
        """Return the same order for the first `count` micro-batches alone; it can run where the whole can."""
        return replace(
            self, workers=tuple(tuple(a for a in actions if a.microbatch < count) for actions in self.workers)
        )

    def to_csv(self, path: str | Path | None = None) -> str:
        """Write torch.distributed.pipelining's compute-only CSV: a line per worker, cells such as 0F3.

        path: a file to which the text is written, too.
        """
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.workers)
        if path is not None:
            write_atomically(path, text.getvalue())
        return text.getvalue()

    @classmethod
    def from_csv(cls, source: str | Path, name: str | None = None) -> Self:
        """Read what torch.distributed.pipelining or `to_csv` wrote: a file, or its text.

        Empty cells (idle) and torch's communication are skipped; an overlapped pair becomes its two actions in order.
        So is the mark that spreadsheets put at the beginning of a file.

        name: default: that of the file.

        Raises:
            ScheduleError: a cell is not an action, or the file cannot be read.
        """
        if is_path(source):
            return cls._from_file(Path(source), name)
        return cls._from_text(str(source), name or "csv")

    @classmethod
    def _from_file(cls, path: Path, name: str | None) -> Self:
        try:
            return cls._from_text(path.read_text(encoding="utf-8"), path.stem if name is None else name)
        except OSError as error:
            raise ScheduleError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ScheduleError(f"cannot read {path}: {error}") from error
        except ScheduleError as error:
            raise ScheduleError(f"{path}: {error}") from error

    @classmethod
    def _from_text(cls, text: str, name: str) -> Self:
        rows = csv.reader(text.removeprefix("\ufeff").rstrip().splitlines())
        try:
            workers = tuple(tuple(_row_actions(row, line)) for line, row in enumerate(rows, start=1))
        except csv.Error as error:
            raise ScheduleError(f"line {rows.line_num}: {error}") from error
        if not any(workers):
            raise ScheduleError("the schedule has no actions: write a line for each worker, such as 0F0,0F1,0B0,0B1")
        return cls(name, workers)


def is_path(source: str | Path) -> bool:
    """Return whether it names a file, and is not the text of one."""
    if isinstance(source, Path):
        return True
    return "\n" not in source and (source.endswith(".csv") or os.path.isfile(source))  # not a file if too long


def location(worker: int, position: int, action: Action) -> str:
    """Say which action is meant: every ScheduleError about an action begins with this."""
    return f"worker {worker}, position {position}, action {action}"


def _actions(name: str, worker: int, listed: Iterable[Any]) -> tuple[Action, ...]:
    """Return the actions that are listed.

    Raises:
        ScheduleError: something else is among them.
    """
    actions = tuple(listed)
    if not {*map(type, actions)} <= {Action}:  # one comparison of sets, since there may be millions
        for position, action in enumerate(actions):
            if not isinstance(action, Action):
                raise ScheduleError(
                    f"schedule {name!r}: worker {worker}, position {position}: {action!r} is not an Action: write op "
                    "('F', 'B', 'I' or 'W'), stage and micro-batch, such as pp.Action('F', 0, 3)"
                )
    return actions


def _two_owners(schedule: Schedule, stage: int) -> str:
    """Say which worker has a stray action of a stage.

    The worker with most of a stage's actions owns it: a single action elsewhere is a slip of the pen.
    """
    counts = [sum(action.stage == stage for action in actions) for actions in schedule.workers]
    owner = counts.index(max(counts))
    stray = next(worker for worker, count in enumerate(counts) if count and worker != owner)
    actions = schedule.workers[stray]
    position = next(index for index, action in enumerate(actions) if action.stage == stage)
    return (
        f"schedule {schedule.name!r}: {location(stray, position, actions[position])}: stage {stage} "
        f"already belongs to worker {owner}: give all its actions to one worker"
    )


def _out_of_range(schedule: Schedule, stage: int, worker: int, count: int) -> str:
    actions = schedule.workers[worker]
    position = next(index for index, action in enumerate(actions) if action.stage == stage)
    return (
        f"schedule {schedule.name!r}: {location(worker, position, actions[position])}: there is no stage {stage}: "
        f"number the {count} stages from 0 to {count - 1}"
    )


def _row_actions(row: list[str], line: int) -> Iterator[Action]:
    for column, cell in enumerate(row, start=1):
        overlap = _OVERLAP.fullmatch(cell.strip())
        for part in overlap[1].split(";") if overlap else [cell]:
            action = _parse(part.strip(), line, column)
            if action is not None:
                yield action


def _parse(cell: str, line: int, column: int) -> Action | None:
    if not cell or _COMMUNICATION.fullmatch(cell):
        return None
    action = Action.parse(cell)
    if action is None:
        raise ScheduleError(
            f"line {line}, cell {column}: {cell[:_SHOWN]!r} is not an action: "
            "write stage, then F, B, I or W, then micro-batch, such as 0F3"
        )
    return action
