"""Metrics that nodes log: what becomes of them where the file cannot be written."""

from pathlib import Path

import pytest

from lp_pipe.telemetry.metrics import MetricsLog, MetricsRecord


def test_a_file_that_cannot_be_written_costs_the_record_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[MetricsRecord] = []
    log = MetricsLog(tmp_path / "removed" / "metrics.jsonl", (seen.append,))
    log.record("trainer/0", {"loss": 1.0}, 1)
    log.record("trainer/0", {"loss": 2.0}, 2)
    assert caplog.text.count("metrics are lost") == 1
    (tmp_path / "removed").mkdir()
    log.record("trainer/0", {"loss": 3.0}, 3)
    log.close()
    assert [record.step for record in seen] == [1, 2, 3]
    assert '"step": 3' in (tmp_path / "removed" / "metrics.jsonl").read_text()
