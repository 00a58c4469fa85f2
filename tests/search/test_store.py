"""The store commits each report whole or not at all, refuses older attempts and slots, and survives a failed write."""

import math
import pickle
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import lp_pipe.search as ls
from lp_pipe.search.store import ExperimentIsLive, Reading, Store, read_only, rows_in


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path, "loss", {})) as store:
        yield store


def rows(folder: Path) -> list[tuple[int, int, str, float]]:
    with closing(read_only(folder)) as db:
        return [row[:4] for row in rows_in(db)]


def test_a_report_that_is_sent_twice_is_stored_once_and_a_gap_is_refused(store: Store, tmp_path: Path) -> None:
    attempt = store.begin(0, {"lr": 0.1}, 0, 4).attempt
    store.report(0, attempt, 1, {"loss": 2.0, "accuracy": math.nan}, "a")
    store.report(0, attempt, 1, {"loss": 9.0}, "b")
    with pytest.raises(ValueError, match="3"):
        store.report(0, attempt, 3, {"loss": 1.0})
    assert [row[:3] for row in rows(tmp_path)] == [(0, 1, "loss"), (0, 1, "accuracy")]
    assert store.checkpoints() == [("a", 0, 1, 2.0)]


def test_an_older_attempt_is_refused_and_a_newer_one_sets_its_later_rows_aside(store: Store, tmp_path: Path) -> None:
    old = store.begin(0, {}, 0, 4).attempt
    for step in (1, 2, 3):
        store.report(0, old, step, {"loss": float(step)}, "one" if step == 1 else None)
    store.slot_died(store.trials[0])
    record = store.begin(0, {}, 1, 4)
    assert (record.step, record.attempt) == (1, old + 1)
    for call in (lambda: store.report(0, old, 4, {"loss": 0.0}), lambda: store.end(0, old, "failed")):
        with pytest.raises(ls.StaleAttempt):
            call()
    store.report(0, record.attempt, 2, {"loss": 7.0})
    assert [row[1::2] for row in rows(tmp_path)] == [(1, 1.0), (2, 7.0)] and store.reports == [(0, 1), (0, 2)]
    with closing(Reading(tmp_path, "loss")) as reading:
        assert reading.trials[0].values == record.values == {1: 1.0, 2: 7.0}


def test_a_slot_that_was_taken_for_dead_is_not_its_successor(store: Store) -> None:
    assert store.register(0, "first") and not store.register(0, "first")
    assert store.register(0, "second")
    assert store.is_present(0, "second") and not store.is_present(0, "first") and not store.is_present(1, "first")


def test_a_failed_write_leaves_nothing_and_the_next_one_succeeds(store: Store, tmp_path: Path) -> None:
    attempt = store.begin(0, {}, 0, 4).attempt
    store.report(0, attempt, 1, {"loss": 1.0})
    with closing(sqlite3.connect(tmp_path / "experiment.sqlite")) as other:
        other.execute("CREATE TRIGGER full BEFORE INSERT ON checkpoints BEGIN SELECT RAISE(ROLLBACK, 'full'); END")
        with pytest.raises(sqlite3.Error):
            store.report(0, attempt, 2, {"loss": 2.0, "new": 3.0}, "two")
        assert (store.trials[0].step, store.trials[0].values) == (1, {1: 1.0})
        other.execute("DROP TRIGGER full")
    store.report(0, attempt, 2, {"loss": 2.0, "new": 3.0}, "two")
    assert rows(tmp_path) == [(0, 1, "loss", 1.0), (0, 2, "loss", 2.0), (0, 2, "new", 3.0)]


def test_one_process_writes_and_a_pause_lasts_until_the_next_launch(tmp_path: Path) -> None:
    with closing(Store(tmp_path, "loss", {"launch": "first"})) as store:
        with pytest.raises(ExperimentIsLive):
            Store(tmp_path, "loss", {})
        store.pause("first")
    for launch, is_paused in (("first", True), ("second", False)):
        with closing(Store(tmp_path, "loss", {"launch": launch})) as store:
            assert store.is_paused() == is_paused


def test_trials_and_errors_can_be_pickled() -> None:
    from lp_pipe.search.searcher_node import Lease

    trial = ls.Trial(Lease(3, {"lr": 0.1}, 2, 1, 4, None), None, Path("folder"), 7)
    copy = pickle.loads(pickle.dumps(trial))
    assert (copy.id, copy.params, copy.seed, copy.attempt, copy.folder) == (3, {"lr": 0.1}, 7, 2, Path("folder"))
    assert str(pickle.loads(pickle.dumps(ls.StaleAttempt("old")))) == "old"
