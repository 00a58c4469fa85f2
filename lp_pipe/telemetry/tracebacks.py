"""Tracebacks for people: the user's own frames in a line each, everybody else's folded."""

import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

_HEADER = "Traceback (most recent call last):"
_GROUP_HEADER = f"Exception Group {_HEADER}"
# What Python draws around an exception group: "  | " before its lines, "  +-+------ 1 ------" before each member,
# and "    +-------------" behind the last one.
_MARGIN = re.compile(r"^(?: +\| ?)*")
_SEPARATOR = re.compile(r" *\+(?:-\+)?-{4,}(?: (?P<member>[\d.]+) -{4,})?$")
_FRAME = re.compile(r'  File "(?P<file>.+?)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_PACKAGE = f"{Path(__file__).parents[1]}/"
_STDLIB = f"{sysconfig.get_path('stdlib')}/"
_INSTALLED = re.compile(r"/(?:site|dist)-packages/([^/]+?)(?:\.py)?(?:/|$)")
_REMOTE_CALL = re.compile(r"[\w.]+: (?P<call>\S+\(\) raised .*)")
_MAX_LETTERS = 160


@dataclass
class _PrintedFrame:
    file: str
    line: int
    function: str
    source: str = ""


@dataclass
class _PrintedException:
    """One exception: its frames, the first line of what it says, and those behind it."""

    frames: list[_PrintedFrame] = field(default_factory=list)
    error: str = ""
    more: list[str] = field(default_factory=list)
    is_member: bool = False  # of an exception group


def fold_traceback(text: str, folder: Path | None = None) -> list[str]:
    """The frames of a traceback as Python prints it, outermost first, with its causes and remote calls.

    Between two exceptions stands what the first one says; what the last one says is the caller's to print. Behind an
    exception group its members stand, with what they say.
    folder: file names below it are shown relative to it.
    """
    found = _blocks(text)
    blocks = [block for block in found if block.frames and not block.is_member]
    lines: list[str] = []
    for block in blocks:
        lines += _folded(block.frames, folder)
        if block is not blocks[-1] and block.error:
            remote = _REMOTE_CALL.match(block.error)  # its class says no more than what is said after "raised"
            lines.append(shortened(remote["call"] if remote else block.error))
    for member in _members(found) if blocks else ():
        lines += [*_folded(member.frames, folder), shortened(member.error)]
    return lines


def folded_message(message: str, folder: Path | None = None) -> list[str]:
    """Its lines; of a traceback in it (a DataLoader's worker hands one on) what it ends in, and the user's frames."""
    lines = message.splitlines() or [""]
    header = next((index for index, line in enumerate(lines) if index and line.endswith(_HEADER)), None)
    if header is None:
        return lines
    inner = "\n".join([_HEADER, *lines[header + 1 :]])
    last = _last(inner)
    return [*lines[:header], last.error, *fold_traceback(inner, folder)] if last.error else lines


def notes(text: str) -> list[str]:
    """What was added to the last exception of a traceback (add_note), each note once; behind further lines it says.

    Nothing where there is no traceback: a process that was killed has left what it printed last.
    """
    return [line for line in dict.fromkeys(_last(text).more) if line]


def shortened(line: str, letters: int = _MAX_LETTERS) -> str:
    """The line, cut where it would fill a screen."""
    return line if len(line) <= letters else line[: letters - 1] + "…"


def is_of_user(file: str) -> bool:
    """Whether it is the user's own code: not lp_pipe's, the standard library's or an installed package's."""
    return owner_of(file) is None


def owners_of_frames(lines: Iterable[str]) -> set[str | None]:
    """Return the owners (see `owner_of`) of the frames in a printed stack."""
    return {owner_of(frame["file"]) for line in lines if (frame := _FRAME.match(line))}


def _blocks(text: str) -> list[_PrintedException]:
    """One for each exception, in the order of the text: a cause before its effect, a remote error after its call.

    The members of an exception group follow it.
    """
    has_groups = _GROUP_HEADER in text
    found: list[_PrintedException] = []
    block = group = _PrintedException()  # of lines before the first header
    for line in text.splitlines():
        if has_groups:
            line = _MARGIN.sub("", line, count=1)
        separator = _SEPARATOR.match(line) if has_groups and found else None
        if separator:
            group = group if block.is_member else block
            block = _PrintedException(is_member=True) if separator["member"] else group
        elif line.strip().removeprefix("+ ") in (_HEADER, _GROUP_HEADER):
            block = _PrintedException(is_member=block.is_member) if block.frames or block.error else block
        else:
            if found:
                _add(line, block)
            continue
        if not any(block is other for other in found):
            found.append(block)
    return found


def _add(line: str, block: _PrintedException) -> None:
    frame = _FRAME.match(line)
    if block.error:
        block.more.append(line)
    elif frame:
        block.frames.append(_PrintedFrame(frame["file"], int(frame["line"]), frame["function"] or ""))
    elif line and not line.startswith(" "):
        block.error = line
    elif block.frames and not block.frames[-1].source:
        block.frames[-1].source = line.strip()


def _last(text: str) -> _PrintedException:
    """The last exception, or the group that it is in."""
    *_, last = [_PrintedException(), *(block for block in _blocks(text) if not block.is_member)]
    return last


def _members(blocks: list[_PrintedException]) -> list[_PrintedException]:
    """Each once, where it has its frames: a remote error repeats those of the group that it stands for."""
    found: dict[str, _PrintedException] = {}
    for block in blocks:
        if block.is_member and block.error:
            found.setdefault(block.error, block)
    return list(found.values())


def _folded(frames: list[_PrintedFrame], folder: Path | None) -> Iterator[str]:
    is_own = [owner_of(frame.file) is None for frame in frames]
    if any(is_own):
        frames = frames[is_own.index(True) :]  # how lp_pipe came to call the user's code is nobody's concern
    for is_foreign, members in groupby(frames, key=lambda frame: owner_of(frame.file) is not None):
        if is_foreign:
            yield _fold(list(members))
        else:
            yield from (_described(frame, folder) for frame in members)


def _fold(frames: list[_PrintedFrame]) -> str:
    owners = dict.fromkeys(owner for frame in frames if (owner := owner_of(frame.file)))
    return f"  … {len(frames)} frame{'s' if len(frames) > 1 else ''} of {', '.join(owners)}"


def _described(frame: _PrintedFrame, folder: Path | None) -> str:
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


def stack_of(thread: threading.Thread) -> str:
    """Its Python stack right now; in words where it has none, because it has ended meanwhile."""
    frame = sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None
    # Without a frame traceback would give the stack of the caller.
    return "".join(traceback.format_stack(frame)) if frame is not None else "(it has just ended)"
