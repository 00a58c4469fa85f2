"""What Python's fault handler prints when a signal such as SIGSEGV ends a process, as a traceback."""

import linecache
import re
from collections.abc import Sequence

MOST_LINES = 200  # of its output, with 100 frames and what was printed before

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
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)')
_LAUNCHED = re.compile(r'  File "<string>", line 1, in <module>')  # how nodes are started
_ESCAPE = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")


def crash_traceback(lines: Sequence[str], how: str) -> tuple[Sequence[str], str]:
    """Return what a process had printed before it crashed, and the Python stack of the crash as Python's traceback.

    The traceback is empty where these last lines of the process do not tell of the signal in `how`: a child of the
    process may have crashed before.
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
        frame = _FRAME.fullmatch(line)
        if frame is None:
            break
        file = _ESCAPE.sub(_unescaped, frame["file"])
        source = linecache.getline(file, int(frame["line"])).strip() if frame["line"].isdecimal() else ""
        frames.append(f'  File "{file}", line {frame["line"]}, in {frame["function"]}\n    {source}'.rstrip())
    if frames and _LAUNCHED.match(frames[-1]):
        frames.pop()
    if not frames:
        return lines, ""
    printed = lines[:begin] if error in _SIGNALS else lines[: begin + 1]  # what an extension says, no signal tells
    return printed, "\n".join(["Traceback (most recent call last):", *reversed(frames), lines[begin]])


def _unescaped(escape: "re.Match[str]") -> str:
    return chr(int(escape[0][2:], 16))
