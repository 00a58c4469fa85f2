"""A series of any length is drawn from at most 700 buckets, none of which hides its extremes."""

import json
import math
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from lp_pipe.dashboard.metric_lines import columns
from lp_pipe.dashboard.metrics_index import MAX_BUCKETS, MetricsIndex, Series
from tests.dashboard.fixtures import metric_line


def write_values(path: Path, values: list[float], start: int = 0) -> None:
    with path.open("a") as file:
        file.writelines(
            metric_line("trainer/0", step, 1000.0 + step * 0.1, {"loss": value})
            for step, value in enumerate(values, start)
        )


def test_few_points_are_all_returned(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_values(path, [3.0, 1.0, 2.0])
    index = MetricsIndex(path)
    index.refresh()
    assert index.query(("trainer/0", "loss")) == {"x": [0, 1, 2], "y": [3.0, 1.0, 2.0], "points": 3, "axis": "step"}
    assert index.query(("trainer/0", "loss"), "time")["x"] == [1000, 1000.1, 1000.2]
    assert index.query(("trainer/0", "other"))["points"] == 0


@pytest.mark.parametrize("length", [1000, 1001, 2000, 30_000])
def test_every_bucket_has_its_extremes(tmp_path: Path, length: int) -> None:
    path = tmp_path / "metrics.jsonl"
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    values = [round(chance.random(), 6) for _ in range(length)]
    at = chance.randrange(length)
    values[at] = 1000.0
    index = MetricsIndex(path)
    done = 0
    while done < length:  # the file grows while it is looked at
        part = min(length - done, chance.randrange(1, 1 + length // 3))
        write_values(path, values[done : done + part], done)
        done += part
        index.refresh()
        if chance.random() < 0.5:
            index.names()
    found = index.query(("trainer/0", "loss"))
    assert found["points"] == length
    assert len(found["x"]) <= 2 * MAX_BUCKETS
    assert found["x"] == sorted(found["x"])
    assert all(values[step] == value for step, value in zip(found["x"], found["y"], strict=True))
    assert (at, 1000.0) in zip(found["x"], found["y"], strict=True)
    assert min(found["y"]) == min(values)
    few = index.query(("trainer/0", "loss"), buckets=50)
    assert len(few["x"]) <= 100
    assert 1000.0 in few["y"]


@pytest.mark.parametrize(
    ("num_cases", "length"), [(10, 100_000), pytest.param(1000, 1_000_000, marks=pytest.mark.slow)]
)
def test_spike_of_one_point_is_in_a_bucket(num_cases: int, length: int) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance, values = random.Random(seed), np.random.default_rng(seed).random(length)
    steps = np.arange(float(length))
    for _ in range(num_cases // 2):  # one spike down and one up in each series
        spikes = dict(zip(chance.sample(range(length), 2), (-1e3, 1e3), strict=True))
        usual = {at: values[at] for at in spikes}
        for at, spike in spikes.items():
            values[at] = spike
        series, done = Series(), 0
        while done < length:
            end = done + chance.choice([1, 300, length // 3])
            series.extend(steps[done:end], steps[done:end], values[done:end])
            done = min(length, end)
        for at, value in usual.items():
            values[at] = value
        series.settle()
        assert (series.count, len(series.rows) <= MAX_BUCKETS) == (length, True)
        low, high = series.rows[:, 2:4].tolist(), series.rows[:, 5:7].tolist()
        assert all([spike, at] in (low if spike < 0 else high) for at, spike in spikes.items())


@pytest.mark.parametrize("num_cases", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_zoom_shows_each_point_of_a_small_part(tmp_path: Path, num_cases: int) -> None:
    path = tmp_path / "metrics.jsonl"
    chance = random.Random(4)
    values = [round(chance.random(), 6) for _ in range(20_000)]
    write_values(path, values)
    index = MetricsIndex(path)
    index.refresh()
    for _ in range(num_cases):
        low = chance.randrange(19_800)
        found = index.query(("trainer/0", "loss"), "step", low, low + 200)
        drawn = dict(zip(found["x"], found["y"], strict=True))
        assert all(drawn[step] == values[step] for step in range(low, low + 201))
        assert len(drawn) <= 2 * MAX_BUCKETS


def test_points_after_an_offset_are_each_returned_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    index, key = MetricsIndex(path), ("trainer/0", "loss")
    end, seen = 0, []
    for start in range(0, 100, 7):
        write_values(path, [float(step) for step in range(start, start + 7)], start)
        with path.open("a") as file:
            file.write('{"time": 1, "node": "trai')  # a line that is being written
        end, found = index.after(end, {key})
        seen += [step for step, _, _ in found[key]]
        path.write_text(path.read_text().rpartition("\n")[0] + "\n")
    assert seen == list(range(105))


def test_lines_of_other_kinds_and_odd_numbers_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        metric_line("a/0", None, 1.0, {"step": 1.0, "x": "nan"}),
        metric_line("a/0", None, 2.0, {"step": "inf", "x": 2.5}),
        json.dumps({"time": 3.0, "node": "a/0", "event": "restored", "step": 4}) + "\n",
        "no json\n",
        "[1, 2]\n3\nnull\n",
        metric_line("a/0", None, 4.0, {"x": "-inf"}),
    ]
    path.write_text("".join(lines))
    index = MetricsIndex(path)
    known = {row["name"]: row for row in index.names()}
    assert {name: row["points"] for name, row in known.items()} == {"step": 2, "x": 3}
    assert known["x"]["odd"] == 2
    found = index.query(("a/0", "x"), "step")
    assert found["axis"] == "time"
    assert found["y"] == [None, 2.5, None]


def test_another_file_in_its_place_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_values(path, [1.0] * 10)
    index = MetricsIndex(path)
    assert index.names()[0]["points"] == 10
    path.unlink()
    write_values(path, [1.0] * 3)
    assert index.names()[0]["points"] == 3


def as_json(lines: str) -> dict[tuple[str, str], list[tuple[float, ...]]]:
    """Return the points of each series, read by json; null is NaN."""
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for record in map(json.loads, lines.splitlines()):
        for name, value in record.get("values", {}).items():
            point = (record["step"], record["time"], value)
            found.setdefault((record["node"], name), []).append(tuple(float("nan" if n is None else n) for n in point))
    return found


def as_columns(lines: str) -> dict[tuple[str, str], list[tuple[float, ...]]]:
    read = columns([lines.encode()])
    assert len({one[:2] for one in read}) == len(read)
    return {one[:2]: list(zip(*(column.tolist() for column in one[2:]), strict=True)) for one in read}


def odd_float(chance: random.Random) -> float:
    """Return any finite float64, mostly one that is logged often."""
    while True:
        found: float = struct.unpack("d", chance.randbytes(8))[0]
        usual = [
            chance.random(),
            -1e-7 * chance.random(),
            10 ** chance.uniform(-4, 16),
            chance.getrandbits(70),
            3,
            -0.0,
        ]
        found = chance.choice([*usual, round(chance.random(), 4), np.float32(chance.random()).item(), found])
        if math.isfinite(found):
            return float(found) if chance.random() < 0.8 else found


def test_many_lines_are_read_as_json_reads_them() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(40):
        names = [f"{chance.choice(['loss', 'a b', 'step', 'é', 'n' * 60])}{place}" for place in range(3)]
        lines = ""
        for number in range(chance.choice([1, 50])):
            step = chance.choice([number, 10**17, 0, None])
            values = {name: odd_float(chance) for name in names[: chance.choice([1, 3, 3, 3])]}
            node, time = chance.choice(["a/0", "worker/17", "é" * 40]), round(1764139623 + chance.random(), 3)
            lines += metric_line(node, step, time, values)
            if chance.random() < 0.1:
                lines += '{"time": 1, "node": "a/0", "event": "resumed", "step": 1}\n'
        assert repr(sorted(as_columns(lines).items())) == repr(sorted(as_json(lines).items()))


@pytest.mark.parametrize(
    "line",
    [
        '{"time": 1, "node": "a/0", "step": 1, "values": {"a": "nan"}}',
        '{"time": 1, "node": "a\\"/0", "step": 1, "values": {"a": 1}}',
        '{"time": 1, "node": "a/0", "step": true, "values": {"a": 1}}',
        '{"time": 1, "node": "a/0", "step": 1, "values": {}}',
        '{"time": 1, "node": "a/0", "event": "resumed", "step": 1}',
        '{"time":1,"node":"a/0","step":1,"values":{"a":1}}',
        '{"time": 1, "node": "", "step": 1, "values": {"": 1, "b": 2}}',
        '["x", "x", "x", "x", "x", "x"]',
        'x"x"x"x"x"x"x"x"x"x"x"x"x',
        "",
    ],
)
def test_lines_of_another_form_are_read_among_usual_ones(line: str) -> None:
    usual = [metric_line("a/0", step, 1.0, {"a": step / 2}) for step in range(4)]
    lines = "".join([*usual[:2], f"{line}\n", *usual[2:]])
    expected = as_json("".join([*usual[:2], f"{line}\n" if line.startswith("{") else "", *usual[2:]]))
    assert repr(sorted(as_columns(lines).items())) == repr(sorted(expected.items()))


def everything(index: MetricsIndex) -> tuple[object, ...]:
    return index.names(), *(index.query((row["node"], row["name"])) for row in index.names())


def test_the_next_server_reads_only_lines_that_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lp_pipe.dashboard.metrics_index._WORTH_SAVING", 10_000)
    path, saved = tmp_path / "metrics.jsonl", tmp_path / "metrics.index"
    write_values(path, [step % 7 for step in range(3000)])
    with path.open("a") as file:
        file.writelines(
            metric_line("other/0", None, 1200.0 + step, {"x": "nan" if step % 3 else step}) for step in range(9)
        )
    whole = everything(MetricsIndex(path, saved))
    assert everything(MetricsIndex(path, saved)) == whole
    text = path.read_bytes()
    middle = len(text) // 2
    path.write_bytes(text[: middle - 900] + text[middle - 900 : middle].replace(b": 1}", b": 8}") + text[middle:])
    assert everything(MetricsIndex(path, saved)) != everything(MetricsIndex(path))
    path.write_bytes(text)
    write_values(path, [9.0] * 50, 3000)
    assert everything(MetricsIndex(path, saved)) == everything(MetricsIndex(path))
    path.write_bytes(text[: len(text) // 2].rpartition(b"\n")[0] + b"\n")  # another file with the same beginning
    assert everything(MetricsIndex(path, saved)) == everything(MetricsIndex(path))


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"no json\n", b"[1]\n12345678"])
def test_a_damaged_index_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes) -> None:
    monkeypatch.setattr("lp_pipe.dashboard.metrics_index._WORTH_SAVING", 1)
    path, saved = tmp_path / "metrics.jsonl", tmp_path / "metrics.index"
    write_values(path, [1.0, 2.0])
    expected = everything(MetricsIndex(path, saved))
    whole = saved.read_bytes()
    for data in (damage, whole[:-8], whole + b"12345678", whole.replace(b'"end": ', b'"end": 9'), whole[:40]):
        saved.write_bytes(data)
        assert everything(MetricsIndex(path, saved)) == expected
