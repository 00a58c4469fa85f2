"""Short tracebacks: one line for each of the user's frames; frames of libraries are folded into a count."""

import linecache
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

_HEADER = "Traceback (most recent call last):"
_GROUP_HEADER = f"Exception Group {_HEADER}"
# Python prints an exception group with "  | " before its lines, "  +-+------ 1 ------" before each member, and
# "    +-------------" after the last one.
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
    """An exception of a printed traceback: its frames, the first line of its message, and the lines after that."""

    frames: list[_PrintedFrame] = field(default_factory=list)
    error: str = ""
    more: list[str] = field(default_factory=list)
    is_member: bool = False  # of an exception group


def fold_traceback(text: str, folder: Path | None = None) -> list[str]:
    """Return the frames of a traceback that Python printed, outermost first, with its causes and remote calls.

    Between the frames of two exceptions is the first one's message. The last one's message is left out: the caller
    prints it. The members of an exception group follow it, with their messages.
    folder: file names below it are shown relative to it.
    """
    found = _blocks(text)
    blocks = [block for block in found if block.frames and not block.is_member]
    lines: list[str] = []
    for block in blocks:
        lines += _folded(block.frames, folder)
        if block is not blocks[-1] and block.error:
            remote = _REMOTE_CALL.match(block.error)  # the message repeats the class's name after "raised"
            lines.append(shortened(remote["call"] if remote else block.error))
    for member in _members(found) if blocks else ():
        lines += [*_folded(member.frames, folder), shortened(member.error)]
    return lines


def folded_message(message: str, folder: Path | None = None) -> list[str]:
    """Return an error message's lines, with a traceback inside it folded (a DataLoader's worker passes one on)."""
    lines = message.splitlines() or [""]
    header = next((index for index, line in enumerate(lines) if index and line.endswith(_HEADER)), None)
    if header is None:
        return lines
    inner = "\n".join([_HEADER, *lines[header + 1 :]])
    last = _last(inner)
    return [*lines[:header], last.error, *fold_traceback(inner, folder)] if last.error else lines


def notes(text: str) -> list[str]:
    """Return the lines after the first line of the last exception's message: more of the message, then its notes.

    Each line once. Empty if the text is no traceback: a killed process leaves what it printed last.
    """
    return [line for line in dict.fromkeys(_last(text).more) if line]


def shortened(line: str, letters: int = _MAX_LETTERS) -> str:
    """Return the line, cut to at most `letters`."""
    return line if len(line) <= letters else line[: letters - 1] + "…"


def is_of_user(file: str) -> bool:
    """Return whether a file is user code: not of lp_pipe, the standard library or an installed package."""
    return owner_of(file) is None


def owners_of_frames(lines: Iterable[str]) -> set[str | None]:
    """Return the owners (see `owner_of`) of the frames in a printed stack."""
    return {owner_of(frame["file"]) for line in lines if (frame := _FRAME.match(line))}


def _blocks(text: str) -> list[_PrintedException]:
    """Return the exceptions in the order of the text: a cause before its effect, a remote error after its call.

    The members of an exception group follow it.
    """
    has_groups = _GROUP_HEADER in text
    found: list[_PrintedException] = []
    block = group = _PrintedException()  # takes the lines before the first header
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
    """Return the last exception, or the group that contains it."""
    *_, last = [_PrintedException(), *(block for block in _blocks(text) if not block.is_member)]
    return last


def _members(blocks: list[_PrintedException]) -> list[_PrintedException]:
    """Return each member of exception groups once, with its frames: a remote error repeats its group's members."""
    found: dict[str, _PrintedException] = {}
    for block in blocks:
        if block.is_member and block.error:
            found.setdefault(block.error, block)
    return list(found.values())


def _folded(frames: list[_PrintedFrame], folder: Path | None) -> Iterator[str]:
    is_own = [owner_of(frame.file) is None for frame in frames]
    if any(is_own):
        frames = frames[is_own.index(True) :]  # drop lp_pipe's frames that lead to the user's code
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
    """Return which package a file belongs to; None for user code."""
    if file.startswith(_PACKAGE):
        return "lp_pipe"
    installed = _INSTALLED.search(file)
    if installed:
        return installed[1]
    return "the standard library" if file.startswith((_STDLIB, "<frozen ")) else None


def stack_of(thread: threading.Thread) -> str:
    """Return a thread's current Python stack; a sentence in its place if the thread has ended."""
    frame = sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None
    # For None, traceback.format_stack would return the caller's stack.
    return "".join(traceback.format_stack(frame)) if frame is not None else "(it has just ended)"


MOST_LINES = 200  # enough for the fault handler's 100 frames and for some lines that the node printed before

_SIGNALS = {
    "Aborted": "SIGABRT",
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",  # from Python 3.14 on
    "Illegal instruction": "SIGILL",
}
_FATAL = "Fatal Python error: "
_OWN_STACK = re.compile(r"(?:Stack|Current thread 0x\w+(?: \[.*\])?) \(most recent call first\):")
_CRASH_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)')
_LAUNCHED = re.compile(r'  File "<string>", line 1, in <module>')  # the outermost frame of every node process
_ESCAPE = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")


def crash_traceback(lines: Sequence[str], how: str) -> tuple[Sequence[str], str]:
    """Return the lines that a process printed before it crashed, and the stack of the crash as a traceback.

    how: how the process ended; contains the signal's name. The traceback is empty if `lines`, the last lines of the
    process, report another signal: then a child process has crashed earlier.
    """
    begin = max((index for index, line in enumerate(lines) if line.startswith(_FATAL)), default=None)
    if begin is None:
        return lines, ""
    error = lines[begin].removeprefix(_FATAL)
    if _SIGNALS.get(error, "SIGABRT") not in how:
        return lines, ""
    stack = next((index for index, line in enumerate(lines) if index > begin and _OWN_STACK.match(line)), len(lines))
    frames: list[str] = []
    for line in lines[stack + 1 :]:
        frame = _CRASH_FRAME.fullmatch(line)
        if frame is None:
            break
        file = _ESCAPE.sub(_unescaped, frame["file"])
        source = linecache.getline(file, int(frame["line"])).strip() if frame["line"].isdecimal() else ""
        frames.append(f'  File "{file}", line {frame["line"]}, in {frame["function"]}\n    {source}'.rstrip())
    if frames and _LAUNCHED.match(frames[-1]):
        frames.pop()
    if not frames:
        return lines, ""
    printed = lines[:begin] if error in _SIGNALS else lines[: begin + 1]  # keep an extension module's own message
    return printed, "\n".join(["Traceback (most recent call last):", *reversed(frames), lines[begin]])


def _unescaped(escape: "re.Match[str]") -> str:
    return chr(int(escape[0][2:], 16))
