"""The fault handler's output as a traceback, for every form that Python has printed it in."""

from pathlib import Path

import pytest

from lp_pipe.telemetry.tracebacks import crash_traceback

KILLED = "the process was killed by SIGSEGV"


STACK = "Stack (most recent call first):"


def dumped(*frames: str, header: str = STACK, error: str = "Segmentation fault") -> list[str]:
    return ["step 1", f"Fatal Python error: {error}", "", header, *frames, "", "Extension modules: numpy (total: 1)"]


def test_frames_are_in_the_order_of_a_traceback_with_their_source(tmp_path: Path) -> None:
    file = tmp_path / "crâsh.py"
    file.write_text("def deeper():\n    crash()\n\ndeeper()\n")
    escaped = str(file).encode("ascii", "backslashreplace").decode()
    printed, traceback = crash_traceback(
        dumped(f'  File "{escaped}", line 2 in deeper', f'  File "{escaped}", line 4 in main'), KILLED
    )
    assert list(printed) == ["step 1"]
    assert traceback.splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{file}", line 4, in main',
        "    deeper()",
        f'  File "{file}", line 2, in deeper',
        "    crash()",
        "Fatal Python error: Segmentation fault",
    ]


@pytest.mark.parametrize(
    "header",
    [
        STACK,
        "Current thread 0x00007f8a4b4d6790 (most recent call first):",
        "Current thread 0x00007f8a4b4d6790 [python] (most recent call first):",
    ],
)
def test_the_stack_is_that_of_the_thread_that_crashed(header: str) -> None:
    other = ["Thread 0x00007f8a4b4d0000 (most recent call first):", '  File "other.py", line 1 in wait', ""]
    lines = dumped('  File "mine.py", line ??? in crash', header=header)
    _, traceback = crash_traceback([*lines[:3], *other, *lines[3:]], KILLED)
    assert "mine.py" in traceback
    assert "other.py" not in traceback


def test_what_an_extension_says_at_its_end_is_kept() -> None:
    lines = dumped('  File "mine.py", line 1 in run', error="module: it is broken")
    printed, traceback = crash_traceback(lines, "the process was killed by SIGABRT")
    assert list(printed) == ["step 1", "Fatal Python error: module: it is broken"]
    assert "mine.py" in traceback


def test_a_crash_of_another_process_is_not_taken_for_this_ones() -> None:
    lines = [*dumped('  File "child.py", line 1 in run'), "going on"]
    assert crash_traceback(lines, "the process was killed by SIGKILL") == (lines, "")
    assert crash_traceback(["step 1"], KILLED) == (["step 1"], "")
