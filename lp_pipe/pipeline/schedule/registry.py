"""The schedules that can be asked for by name."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Any

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.ir import Schedule, is_path
from lp_pipe.pipeline.schedule.numbers_given import as_int, is_count

Generator = Callable[[int, int, int], Schedule]


@dataclass(frozen=True, slots=True)
class Registered:
    """A function that has a name, and how many chunks it is called with."""

    generator: Generator
    default_chunks: int
    fixed_chunks: bool


_ENTRIES: dict[str, Registered] = {}
_IN_TORCH = {  # names in torch.distributed.pipelining that do not look like ours
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "zb_h1",
    "loopedbfs": "looped_bfs",
    "zbvzerobubble": "zbv",
}


def schedules() -> list[str]:
    """List the names that `make_schedule` takes."""
    return sorted(_ENTRIES)


def make_schedule(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Build the schedule of that name for `stages` workers, each with `chunks` virtual stages.

    Without chunks it is 1, or what the schedule needs.

    Raises:
        ScheduleError: there is no such name, or no such schedule for these numbers; says which work.
    """
    entry = _entry(name)
    return entry.generator(stages, microbatches, entry.default_chunks if chunks is None else chunks)


def default_chunks(name: str) -> int:
    """Return how many virtual stages a worker has by default.

    Raises:
        ScheduleError: there is no such name.
    """
    return _entry(name).default_chunks


def takes_chunks(name: str) -> bool:
    """Return whether the schedule exists for other numbers of virtual stages than `default_chunks`.

    Raises:
        ScheduleError: there is no such name.
    """
    return not _entry(name).fixed_chunks


def nearest_name(asked: object) -> str:
    """Return the name that was probably meant, or "" for no idea.

    torch's names and classes (ScheduleGPipe) are understood, too.
    """
    name = asked.__name__ if isinstance(asked, type) else str(asked)
    name = name.lower().removeprefix("schedule")
    near = get_close_matches(name, [*_IN_TORCH, *schedules()], n=1)
    return _IN_TORCH.get(near[0], near[0]) if near else ""


def names_file(schedule: str | Path) -> bool:
    """Return whether what a user has given for a schedule is a path, and not a name."""
    return schedule not in schedules() and is_path(schedule)


def register_schedule(
    name: str, *, default_chunks: int = 1, fixed_chunks: bool = False
) -> Callable[[Generator], Generator]:
    """Make a function `(stages, microbatches, chunks) -> Schedule` available under a name.

    The function is given whole numbers of at least 1 only, and refused if what it returns is for other numbers. With
    fixed_chunks it exists for default_chunks alone.

    Raises:
        ScheduleError: another function has the name.
    """

    def register(generator: Generator) -> Generator:
        _refuse_second_owner(name, generator)

        @wraps(generator)
        def checked(stages: int, microbatches: int, chunks: int) -> Schedule:
            stages, microbatches, chunks = as_int(stages), as_int(microbatches), as_int(chunks)
            if fixed_chunks and (chunks != default_chunks or not is_count(chunks)):
                raise ScheduleError(
                    f"schedule {name!r} with chunks={chunks!r}: it gives every worker exactly "
                    f"{default_chunks} virtual stage(s): use chunks={default_chunks}"
                    + _more_wrong(lambda: checked(stages, microbatches, default_chunks))
                )
            check_sizes(f"schedule {name!r}", stages=stages, microbatches=microbatches, chunks=chunks)
            made = generator(stages, microbatches, chunks)
            _check_made(name, made, stages, microbatches)
            return made

        _ENTRIES[name] = Registered(checked, default_chunks, fixed_chunks)
        return checked

    return register


def registered(name: str) -> Registered | None:
    """Return what another process has to `adopt` for this name; None: it comes with lp_pipe.

    Raises:
        ScheduleError: there is no such name.
    """
    entry = _entry(name)
    return None if entry.generator.__module__.startswith(f"{__package__}.") else entry


def adopt(name: str, entry: Registered) -> None:
    """Register here what was registered in the process that sent it."""
    _ENTRIES.setdefault(name, entry)


def _entry(name: str) -> Registered:
    if not isinstance(name, str) or name not in _ENTRIES:
        meant = nearest_name(name)
        hint = f": did you mean {meant!r}? There are " if meant else "; there are "
        raise ScheduleError(f"no schedule {name!r}{hint}{', '.join(schedules())}")
    return _ENTRIES[name]


def _refuse_second_owner(name: str, generator: Generator) -> None:
    """Refuse a name that another function has.

    Registering the same function again is fine: a notebook's cell may run twice.
    """
    if name not in _ENTRIES:
        return
    owner = _ENTRIES[name].generator
    if (owner.__module__, owner.__qualname__) != (generator.__module__, generator.__qualname__):
        raise ScheduleError(
            f"schedule {name!r} is already {owner.__module__}.{owner.__qualname__}: register under another name"
        )


def check_sizes(asked: str, **sizes: int) -> None:
    """Refuse sizes that are not whole numbers of at least 1.

    Raises:
        ScheduleError: names all of them, and what was asked for.
    """
    wrong = {what: value for what, value in sizes.items() if not is_count(value)}
    if wrong:
        given = " and ".join(f"{what}={value!r}" for what, value in wrong.items())
        are = "is a whole number (int)" if len(wrong) == 1 else "are whole numbers (int)"
        use = " and ".join(f"{what}=1 or more" for what in wrong)
        raise ScheduleError(f"{asked} with {given}: {' and '.join(wrong)} {are}: use {use}")


def _more_wrong(make: Callable[[], Schedule]) -> str:
    """Say what else is to be changed, so that one error names all of it."""
    try:
        make()
    except ScheduleError as error:
        return f"; and {error}"
    return ""


def _check_made(name: str, made: Any, stages: int, microbatches: int) -> None:
    """Refuse what a function made for other numbers.

    Without this check a function could leave out the last micro-batch: without it the schedule is complete, too.
    """
    if not isinstance(made, Schedule):
        raise ScheduleError(f"schedule {name!r}: its function returned {type(made).__name__}: return a pp.Schedule")
    if (len(made.workers), made.microbatches) != (stages, microbatches):
        raise ScheduleError(
            f"schedule {name!r}: its function made {len(made.workers)} workers and {made.microbatches} micro-batches "
            f"where {stages} and {microbatches} were asked for"
        )
