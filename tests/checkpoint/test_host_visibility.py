"""Checkpoints on several hosts that share no folder are an error, while there is something to be done about it."""

from concurrent.futures import Future
from pathlib import Path

import pytest

from lp_pipe.checkpoint import Checkpoints, checkpoints_in, host_visibility
from lp_pipe.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("no_leaks")


class OfAnotherHost:
    """A part that writes its folder where this host does not see it."""

    def save_async(self, path: Path) -> "Future[None]":
        written: Future[None] = Future()
        written.set_result(None)
        return written

    def load(self, path: Path) -> None:
        assert path.exists()


@pytest.mark.parametrize("may_fail", [False, True])
def test_a_part_that_was_saved_on_another_host_is_no_part_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_fail: bool
) -> None:
    # Such checkpoints had a manifest of no files, counted as whole, and took the place of older ones.
    monkeypatch.setattr(host_visibility, "_APPEARS_WITHIN_S", 0.0)
    checkpoints = Checkpoints({"pipeline": OfAnotherHost()}, tmp_path, may_fail=may_fail)
    with pytest.raises(CheckpointError, match=r"part 'pipeline'.*hosts .* share"):
        checkpoints.save(1)
    assert not checkpoints_in(tmp_path) and not list(tmp_path.iterdir())


def test_what_a_network_file_system_shows_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_visibility.time, "sleep", lambda _: (tmp_path / "late").touch())
    host_visibility.check_is_here(tmp_path / "late", "stages/1 on h2")
