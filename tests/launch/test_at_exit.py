"""The interpreter exits while programs run."""

import sys
from types import FrameType
from typing import Any

import pytest

from lp_pipe.launch import at_exit


class Launched:
    is_stopped = False

    def wait(self) -> None: ...

    def stop_unfinished(self, error: BaseException | None = None) -> None:
        self.is_stopped = True

    def stop(self) -> None:
        assert self.is_stopped


def test_runs_may_end_by_themselves_at_any_line_of_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    # "Set changed size during iteration", and the others were not stopped.
    runs = [Launched() for _ in range(100)]
    monkeypatch.setattr(at_exit, "active_runs", type(at_exit.active_runs)(runs))
    ending = iter(runs)

    def end_one(frame: FrameType, event: str, value: object) -> Any:
        at_exit.active_runs.discard(next(ending, runs[0]))
        return end_one

    before = sys.gettrace()
    sys.settrace(end_one)
    try:
        at_exit._end_runs()
    finally:
        sys.settrace(before)
    assert runs[-1].is_stopped, "one that was left when the exit began"
