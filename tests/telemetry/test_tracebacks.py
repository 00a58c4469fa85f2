"""Tracebacks in few lines."""

import json
import threading
import traceback
from pathlib import Path

import lp_pipe
from lp_pipe.errors import noting
from lp_pipe.rpc import remote_error
from lp_pipe.telemetry.tracebacks import fold_traceback, notes, stack_of

HERE = Path(__file__).parent
FRAMEWORK = Path(lp_pipe.__file__).parent / "rpc" / "client.py"


def printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def fails() -> None:
    raise ValueError("too hot")


def test_own_frames_take_a_line_each_with_their_source() -> None:
    try:
        fails()
    except ValueError as error:
        lines = fold_traceback(printed(error), HERE)
    assert lines == [
        f"test_tracebacks.py:{fails.__code__.co_firstlineno + 6} in "
        "test_own_frames_take_a_line_each_with_their_source:  fails()",
        f'test_tracebacks.py:{fails.__code__.co_firstlineno + 1} in fails:  raise ValueError("too hot")',
    ]


def test_frames_of_others_are_folded() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        lines = fold_traceback(printed(error), HERE)
    assert len(lines) == 2
    assert lines[1] == "  … 3 frames of the standard library"


def test_a_remote_call_shows_both_sides_and_the_error_between() -> None:
    text = f"""\
Traceback (most recent call last):
  File "{FRAMEWORK.parent}/execute.py", line 3, in run_node
    node.execute()
  File "/home/me/train.py", line 12, in run
    self.evaluator.evaluate()
  File "{FRAMEWORK}", line 77, in __call__
    return self.result()
    ~~~~~~~~~~~^^
  File "{FRAMEWORK}", line 80, in result
    raise error
lp_pipe.errors.ValueError: evaluator/0.evaluate() raised ValueError: too hot

Traceback (most recent call last):
  File "{FRAMEWORK.parent}/server.py", line 9, in _run
    handler()
  File "/home/me/train.py", line 30, in evaluate
    raise ValueError("too hot")
ValueError: too hot
"""
    assert fold_traceback(text, Path("/home/me")) == [
        "train.py:12 in run:  self.evaluator.evaluate()",
        "  … 2 frames of lp_pipe",
        "evaluator/0.evaluate() raised ValueError: too hot",
        'train.py:30 in evaluate:  raise ValueError("too hot")',
    ]


def test_a_cause_comes_before_its_effect() -> None:
    try:
        try:
            fails()
        except ValueError as error:
            raise RuntimeError("gave up") from error
    except RuntimeError as error:
        lines = fold_traceback(printed(error), HERE)
    assert lines[2] == "ValueError: too hot"
    assert len(lines) == 4


def test_text_without_a_traceback_has_no_frames() -> None:
    assert fold_traceback("The process left no traceback; it had printed nothing") == []


def test_notes_are_those_of_the_last_exception_each_once() -> None:
    """A remote error repeats behind the other side's traceback what it has copied."""
    text = f"""\
Traceback (most recent call last):
  File "{FRAMEWORK}", line 80, in result
    raise error
lp_pipe.errors.ValueError: stages/0.step() raised ValueError: too hot
  by far

Traceback (most recent call last):
  File "/home/me/train.py", line 30, in forward
    raise ValueError("too hot")
  [Previous line repeated 3 more times]
ValueError: too hot
  by far
in layer 3.Linear
in stages/0, step 7
in layer 3.Linear
in stages/0, step 7
"""
    assert notes(text) == ["  by far", "in layer 3.Linear", "in stages/0, step 7"]
    assert notes("") == []
    assert notes("The process left no traceback; it had printed:\nabout to wait\npid 1") == []


def test_an_exception_group_shows_its_members() -> None:
    """Theirs are the causes: an asyncio.TaskGroup says "unhandled errors in a TaskGroup" for any of them."""
    error = group()
    assert fold_traceback(printed(error), HERE) == [
        f"test_tracebacks.py:{group.__code__.co_firstlineno + 8} in group:  "
        'raise ExceptionGroup("of tasks", [caught, KeyError("b")])',
        f"test_tracebacks.py:{group.__code__.co_firstlineno + 3} in group:  fails()",
        f'test_tracebacks.py:{fails.__code__.co_firstlineno + 1} in fails:  raise ValueError("too hot")',
        "ValueError: too hot",
        "KeyError: 'b'",
    ]
    assert notes(printed(error)) == ["in layer 3.Linear"]


def test_an_exception_group_from_afar_has_its_frames_notes_and_members_once() -> None:
    """Regression: the report had none of them, only "its last lines"."""
    text = printed(remote_error.rebuild(remote_error.capture(group()), "stages/1.train()"))
    *_, raised, task, failed, hot, key = fold_traceback(text, HERE)
    assert 'raise ExceptionGroup("of tasks"' in raised
    assert (task.split(":  ")[1], failed.split(":  ")[1]) == ("fails()", 'raise ValueError("too hot")')
    assert (hot, key) == ("ValueError: too hot", "KeyError: 'b'")
    assert notes(text) == ["in layer 3.Linear"]


def group() -> BaseException:
    """Return a group as it is caught."""
    try:
        fails()
    except ValueError as error:
        caught = error
    try:
        with noting("in layer 3.Linear"):
            raise ExceptionGroup("of tasks", [caught, KeyError("b")])
    except ExceptionGroup as error:
        return error


def test_a_threads_stack_is_its_own_and_not_the_callers() -> None:
    def wait_inside() -> None:
        is_inside.set()
        release.wait(20)

    is_inside, release = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_inside)
    thread.start()
    assert is_inside.wait(20)
    assert "in wait_inside" in stack_of(thread)
    release.set()
    thread.join()
    # Of one that ended while it was named, a warning showed where the one who warned was.
    assert stack_of(thread) == "(it has just ended)"
