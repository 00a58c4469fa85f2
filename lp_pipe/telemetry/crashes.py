"""Read the output of Python's fault handler, which reports a signal such as SIGSEGV, as a Python traceback."""

import linecache
import re
from collections.abc import Sequence

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
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)')
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
    printed = lines[:begin] if error in _SIGNALS else lines[: begin + 1]  # keep an extension module's own message
    return printed, "\n".join(["Traceback (most recent call last):", *reversed(frames), lines[begin]])


def _unescaped(escape: "re.Match[str]") -> str:
    return chr(int(escape[0][2:], 16))
