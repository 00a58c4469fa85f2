"""A step that fails again and again is named, or left out; one that fails by chance is neither."""

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lp_pipe.checkpoint import Checkpoints, PoisonBatchError, checkpoints, checkpoints_in, poison
from lp_pipe.errors import NonFiniteError, Unavailable


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the program ends, as a node would be told."""
    stop = threading.Event()
    for module in (checkpoints, poison):
        monkeypatch.setattr(module, "stop_event", lambda: stop)
    return stop


class Result(NamedTuple):
    step: int
    why_skipped: str = ""


class Pipeline:
    """A pipeline whose state is the list of steps whose updates it has. failures: what each try of a step raises.

    steps_ahead: so many steps before a bad one nothing comes any more, unless they are asked for alone.
    """

    def __init__(self, failures: dict[int, list[Exception]], steps_ahead: int = 0) -> None:
        self.updates: list[int] = []
        self.skipped: list[int] = []
        self.tries: Counter[int] = Counter()
        self.recoveries = 0
        self.steps_ahead = steps_ahead
        self._failures = failures
        self._is_lost = False

    def current_step(self) -> int:
        self._check()
        return len(self.updates) + len(self.skipped)

    def steps(self, n: int) -> Iterator[Result]:
        for left in reversed(range(n)):
            self._check()
            step = self.current_step()
            self.tries[step] += 1
            for bad in range(step, step + 1 + min(left, self.steps_ahead)):
                if self._failures.get(bad):
                    error = self._failures[bad].pop()
                    self._is_lost = isinstance(error, Unavailable)
                    raise error
            self.updates.append(step)
            yield Result(step)

    def skip_step(self, why: str) -> Result:
        step = self.current_step()
        self.skipped.append(step)
        return Result(step, why)

    def recover(self) -> None:
        self._is_lost = False
        self.recoveries += 1

    def state_dict(self) -> dict[str, list[int]]:
        self._check()
        return {"updates": [*self.updates], "skipped": [*self.skipped]}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.updates, self.skipped = [*state["updates"]], [*state["skipped"]]

    def _check(self) -> None:
        if self._is_lost:
            raise Unavailable("stages/0.current_step(): nobody listens")


def killed(times: int) -> list[Exception]:
    return [Unavailable("stages/0.step() raised Unavailable: stages/2.train(): the connection ended")] * times


def trained(pipeline: Pipeline, folder: Path, **options: Any) -> list[Result]:
    return list(Checkpoints({"pipeline": pipeline}, folder).steps(pipeline, 8, save_every=3, **options))


def test_a_step_that_always_kills_a_stage_is_named_after_three_tries(tmp_path: Path) -> None:
    pipeline = Pipeline({4: killed(9)})
    with pytest.raises(PoisonBatchError) as caught:
        trained(pipeline, tmp_path)
    assert str(caught.value).startswith(
        "step 4 has failed 3 times in a row, the last time in stages/2: stages/0.step()"
    )
    assert "feeder.batch(4)" in str(caught.value)
    assert (caught.value.step, pipeline.tries[4]) == (4, 3)
    assert isinstance(caught.value.__cause__, Unavailable)


def test_it_is_left_out_if_so_configured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = Pipeline({4: killed(9)})
    results = trained(pipeline, tmp_path, on_poison="skip", tries=2)
    assert (pipeline.updates, pipeline.skipped) == ([0, 1, 2, 3, 5, 6, 7], [4])
    assert (pipeline.tries[4], pipeline.recoveries) == (2, 2)
    assert [result.step for result in results] == [0, 1, 2, 3, 3, 3, 4, 5, 6, 7]
    assert [result.step for result in results if result.why_skipped] == [4]
    assert "step 4 has failed 2 times in a row, the last time in stages/2" in caplog.text
    # At once, so that nobody goes back to before it.
    assert "step-00000005" in [path.name for path in checkpoints_in(tmp_path)]


def test_a_later_failure_does_not_try_it_again(tmp_path: Path) -> None:
    pipeline = Pipeline({4: killed(9), 5: killed(1), 7: killed(2)})
    for path in trained_with_lost_checkpoints(pipeline, tmp_path):
        assert path.name != "step-00000005"
    assert (pipeline.tries[4], pipeline.skipped) == (3, [4])


def trained_with_lost_checkpoints(pipeline: Pipeline, folder: Path) -> list[Path]:
    """Train as if the checkpoint behind the step that is left out were damaged."""
    for result in Checkpoints({"pipeline": pipeline}, folder).steps(pipeline, 8, save_every=3, on_poison="skip"):
        if result.step == 5:
            (folder / "step-00000005" / "pipeline.state").write_bytes(b"")
            (folder / "step-00000005").rename(folder / ".step-00000005")
    return checkpoints_in(folder)


def test_failures_by_chance_are_not_counted_together(tmp_path: Path) -> None:
    """A step that has succeeded begins anew, and so does the count at another step."""
    pipeline = Pipeline({3: killed(2), 4: killed(2), 5: killed(2), 6: killed(2)})
    trained(pipeline, tmp_path)
    assert (pipeline.updates, pipeline.recoveries) == ([*range(8)], 8)


@pytest.mark.parametrize("deaths", [1, 2])
def test_steps_run_ahead_until_the_next_failure_may_be_the_last(tmp_path: Path, deaths: int) -> None:
    # They ran alone after the first one, which is mostly chance. What the loop does between two steps (an evaluation,
    # scheduler_step) then came a step earlier than without the death, and the training ended with other parameters.
    asked: list[int] = []

    class Asked(Pipeline):
        def steps(self, n: int) -> Iterator[Result]:
            asked.append(n)
            return super().steps(n)

    trained(Asked({5: killed(deaths)}, steps_ahead=2), tmp_path)
    assert (1 in asked) == (deaths == 2)


def test_also_the_only_try_leaves_out_no_step_that_another_one_has_ended(tmp_path: Path) -> None:
    # The step that was awaited was left out, and then the bad one behind it, too.
    pipeline = Pipeline({5: killed(9)}, steps_ahead=2)
    trained(pipeline, tmp_path, on_poison="skip", tries=1)
    assert (pipeline.skipped, pipeline.updates) == ([5], [0, 1, 2, 3, 4, 6, 7])


def test_where_steps_run_ahead_the_bad_one_is_found_by_trying_them_alone(tmp_path: Path) -> None:
    pipeline = Pipeline({5: killed(9)}, steps_ahead=2)
    trained(pipeline, tmp_path, on_poison="skip")
    assert (pipeline.updates, pipeline.skipped) == ([0, 1, 2, 3, 4, 6, 7], [5])
    assert pipeline.recoveries == 3


def test_a_checkpoint_that_waits_for_the_bad_step_counts_as_a_try(tmp_path: Path) -> None:
    class DiesBehind(Pipeline):
        """A pipeline that dies of step 3, which runs already when the caller asks for the step after 2."""

        until = 0

        def steps(self, n: int) -> Iterator[Result]:
            self.until = self.current_step() + n
            return super().steps(n)

        def current_step(self) -> int:
            if self.until > 3 and self.updates == [0, 1, 2] and not self.skipped:
                self._is_lost, self.until = True, 0
                raise self._failures[3].pop()
            return super().current_step()

    pipeline = DiesBehind({3: killed(9)})
    pipeline.steps_ahead = 1
    trained(pipeline, tmp_path, on_poison="skip", tries=2)
    assert (pipeline.skipped, pipeline.recoveries) == ([3], 2)


def test_what_a_stage_raises_ends_the_loop_at_once_unless_it_may_be_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="no such token"):
        trained(Pipeline({1: [ValueError("no such token")]}), tmp_path / "stop")
    pipeline = Pipeline({1: [ValueError("no such token")] * 9, 2: [NonFiniteError("step 2: the loss is nan")]})
    with caplog.at_level(logging.WARNING), pytest.raises(NonFiniteError):  # it has an option of its own
        trained(pipeline, tmp_path / "skip", on_poison="skip")
    assert (pipeline.updates, pipeline.skipped, pipeline.recoveries) == ([0], [1], 0)
    assert "step 1 failed (try 1 of 3): no such token" in caplog.text


def test_going_back_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    """Else the next one of the same step took its place while it was read."""
    may_write = threading.Event()

    class SavesLater(Pipeline):
        loaded_early = False

        def save_async(self, path: Path) -> "Future[None]":
            written: Future[None] = Future()
            updates = [*self.updates]

            def write() -> None:
                assert not updates or may_write.wait(10)
                path.mkdir()
                (path / "updates").write_text(str(len(updates)))
                written.set_result(None)

            threading.Thread(target=write).start()
            return written

        def steps(self, n: int) -> Iterator[Result]:
            for result in super().steps(n):
                yield result
                if result.step == 2:  # its checkpoint is on its way; step 3 fails
                    threading.Timer(0.05, may_write.set).start()

        def load(self, path: Path) -> None:
            self.loaded_early = self.loaded_early or (bool(self.updates) and not may_write.is_set())
            self.updates = [*range(int((path / "updates").read_text()))]

    pipeline = SavesLater({3: [ValueError("by chance")]})
    trained(pipeline, tmp_path, on_poison="skip")
    assert (pipeline.updates, pipeline.tries[3], pipeline.loaded_early) == ([*range(8)], 2, False)


@pytest.mark.parametrize("failure", [ValueError("by chance"), *killed(1)], ids=lambda failure: type(failure).__name__)
def test_going_back_goes_on_beside_a_checkpoint_that_cannot_be_written_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, failure: Exception
) -> None:
    class SavesElsewhere(Pipeline):
        saved = 0

        def save_async(self, path: Path) -> "Future[None]":
            self.saved += 1
            written: Future[None] = Future()
            if self.saved == 2:
                written.set_exception(OSError(28, "No space left on device"))
            else:
                path.mkdir()
                (path / "updates").write_text(str(len(self.updates)))
                written.set_result(None)
            return written

        def load(self, path: Path) -> None:
            self.updates = [*range(int((path / "updates").read_text()))]

    pipeline = SavesElsewhere({3: [failure]})
    results = trained(pipeline, tmp_path, on_poison="skip")
    assert [result.step for result in results] == [0, 1, 2, *range(8)]
    assert "the checkpoint of step 3 could not be written" in caplog.text


def test_a_program_that_ends_is_no_poison(tmp_path: Path, running: threading.Event) -> None:
    running.set()
    with pytest.raises(Unavailable):
        trained(Pipeline({1: killed(1)}), tmp_path, tries=1)


def test_the_end_of_the_data_ends_the_loop(tmp_path: Path) -> None:
    class Short(Pipeline):
        def steps(self, n: int) -> Iterator[Result]:
            return super().steps(min(n, 5 - self.current_step()))

    assert [result.step for result in trained(Short({}), tmp_path)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("options", "message"), [({"tries": 0}, "tries=0"), ({"on_poison": "eat"}, "on_poison='eat'")])
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(Pipeline({}), tmp_path, **options)
