"""Tracebacks for people: the user's own frames in a line each, everybody else's folded."""

import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<file>.+?)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_PACKAGE = f"{Path(__file__).parents[1]}/"
_STDLIB = f"{sysconfig.get_path('stdlib')}/"
_INSTALLED = re.compile(r"/(?:site|dist)-packages/([^/]+?)(?:\.py)?(?:/|$)")
_REMOTE_CALL = re.compile(r"[\w.]+: (?P<call>\S+\(\) raised .*)")
_MAX_LETTERS = 160


@dataclass
class _Frame:
    file: str
    line: int
    function: str
    source: str = ""


@dataclass
class _Block:
    """One exception: its frames, the first line of what it says, and those behind it."""

    frames: list[_Frame] = field(default_factory=list)
    error: str = ""
    more: list[str] = field(default_factory=list)


def fold_traceback(text: str, folder: Path | None = None) -> list[str]:
    """The frames of a traceback as Python prints it, outermost first, with its causes and remote calls.

    Between two exceptions stands what the first one says; what the last one says is the caller's to print.
    folder: file names below it are shown relative to it.
    """
    blocks = [block for block in _blocks(text) if block.frames]
    lines: list[str] = []
    for block in blocks:
        lines += _folded(block.frames, folder)
        if block is not blocks[-1] and block.error:
            remote = _REMOTE_CALL.match(block.error)  # its class says no more than what is said after "raised"
            lines.append(shortened(remote["call"] if remote else block.error))
    return lines


def folded_message(message: str, folder: Path | None = None) -> list[str]:
    """Its lines; of a traceback in it (a DataLoader's worker hands one on) what it ends in, and the user's frames."""
    lines = message.splitlines() or [""]
    header = next((index for index, line in enumerate(lines) if index and line.endswith(_HEADER)), None)
    if header is None:
        return lines
    inner = "\n".join([_HEADER, *lines[header + 1 :]])
    *_, last = _blocks(inner)
    return [*lines[:header], last.error, *fold_traceback(inner, folder)] if last.error else lines


def notes(text: str) -> list[str]:
    """What was added to the last exception of a traceback (add_note), each note once; behind further lines it says.

    Nothing where there is no traceback: a process that was killed has left what it printed last.
    """
    *_, last = [_Block(), *_blocks(text)]
    return [line for line in dict.fromkeys(last.more) if line]


def shortened(line: str, letters: int = _MAX_LETTERS) -> str:
    """The line, cut where it would fill a screen."""
    return line if len(line) <= letters else line[: letters - 1] + "…"


def is_of_user(file: str) -> bool:
    """Whether it is the user's own code: not lp_pipe's, the standard library's or an installed package's."""
    return owner_of(file) is None


def _blocks(text: str) -> Iterator[_Block]:
    """One for each exception, in the order of the text: a cause before its effect, a remote error after its call."""
    block: _Block | None = None
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if line.strip() == _HEADER:
            if block is not None:
                yield block
            block = _Block()
        elif block is None:
            continue
        elif block.error:
            block.more.append(line)
        elif frame:
            block.frames.append(_Frame(frame["file"], int(frame["line"]), frame["function"] or ""))
        elif line and not line.startswith(" "):
            block.error = line
        elif block.frames and not block.frames[-1].source:
            block.frames[-1].source = line.strip()
    if block is not None:
        yield block


def _folded(frames: list[_Frame], folder: Path | None) -> Iterator[str]:
    is_own = [owner_of(frame.file) is None for frame in frames]
    if any(is_own):
        frames = frames[is_own.index(True) :]  # how lp_pipe came to call the user's code is nobody's concern
    for is_foreign, members in groupby(frames, key=lambda frame: owner_of(frame.file) is not None):
        if is_foreign:
            yield _fold(list(members))
        else:
            yield from (_described(frame, folder) for frame in members)


def _fold(frames: list[_Frame]) -> str:
    owners = dict.fromkeys(owner for frame in frames if (owner := owner_of(frame.file)))
    return f"  … {len(frames)} frame{'s' if len(frames) > 1 else ''} of {', '.join(owners)}"


def _described(frame: _Frame, folder: Path | None) -> str:
    path = Path(frame.file)
    shown = path.relative_to(folder) if folder is not None and path.is_relative_to(folder) else path
    function = f" in {frame.function}" if frame.function else ""
    source = f":  {frame.source}" if frame.source else ""
    return shortened(f"{shown}:{frame.line}{function}{source}")


def owner_of(file: str) -> str | None:
    """Whose code it is; None for the user's."""
    if file.startswith(_PACKAGE):
        return "lp_pipe"
    installed = _INSTALLED.search(file)
    if installed:
        return installed[1]
    return "the standard library" if file.startswith((_STDLIB, "<frozen ")) else None
