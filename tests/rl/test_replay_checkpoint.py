"""A checkpoint has a table as it was at one moment, and of a table that has hardly changed little is written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
import lp_pipe.rl as rl
from lp_pipe.checkpoint import Checkpoints, open_checkpoint
from lp_pipe.errors import CheckpointError
from lp_pipe.rl.replay.snapshot import Snapshots, read_snapshots
from lp_pipe.rl.replay.table import TableState
from lp_pipe.rl.results import fingerprint_of
from tests.seeds import random_numbers


def items(count: int, first: int = 0, width: int = 3) -> dict[str, Any]:
    numbers = np.arange(first, first + count)
    return {"x": numbers, "deep": (np.repeat(numbers[:, None], width, axis=1),)}


def table_of(*options: Any) -> TableState:
    return TableState(rl.Table(*options), np.random.default_rng(0))


@pytest.mark.parametrize("remover", [rl.Fifo(), rl.Uniform()])
@pytest.mark.parametrize("sampler", [rl.Uniform(), rl.Prioritized(), rl.Lifo()])
@pytest.mark.parametrize("times", [0, 2])
def test_a_checkpoint_has_the_table_of_one_moment(sampler: Any, remover: Any, times: int, tmp_path: Path) -> None:
    numbers = random_numbers(times)
    table, restored = (table_of(300, sampler, remover, times) for _ in range(2))
    snapshots = Snapshots()

    def change() -> None:
        table.insert(items(numbers.randrange(1, 60), table.inserts))
        sample = table.sample(7)
        table.update_priorities(sample.keys, np.arange(7.0))

    for number in range(12):
        snapshots.take(number, [table])
        before = fingerprint_of(table.state_dict())
        for _ in range(numbers.randrange(4)):
            change()
        snapshots.write(tmp_path / f"{number}")
        own, (small,) = read_snapshots(tmp_path / f"{number}")
        restored.load_segments(small, tmp_path / f"{number}", 0)
        assert own == number and fingerprint_of(restored.state_dict()) == before
        change()
    snapshots.take(None, [table])
    snapshots.write(tmp_path / "last")
    restored.load_segments(read_snapshots(tmp_path / "last")[1][0], tmp_path / "last", 0)
    for number in range(1000 // 4 if not times else 20):
        for one in (table, restored):
            one.insert(items(4, 10 * number))
        for found, expected in zip(restored.sample(4)[:4], table.sample(4)[:4], strict=True):
            np.testing.assert_array_equal(found, expected)
    assert fingerprint_of(restored.state_dict()) == fingerprint_of(table.state_dict())


def test_one_percent_of_new_items_writes_little(tmp_path: Path) -> None:
    program = lp.Program("replay")
    tables = {"a": rl.Table(20_000, rl.Prioritized()), "b": rl.Table.queue(10)}
    replay = program.add_node(rl.ReplayNode(tables), label="replay")
    with lp.launch(program, "thread", run_dir=tmp_path / "run") as run:
        client = run.client(replay)
        checkpoints = Checkpoints({"replay": rl.ReplayPart(client)}, tmp_path)
        client.insert("b", items(4))
        for first in range(0, 25_000, 5_000):
            client.insert("a", items(5_000, first, 51))
        checkpoints.save(1)
        client.insert("a", items(200, 25_000, 51))
        keys = client.sample("a", 2_000).keys
        client.update_priorities("a", keys, np.arange(2_000.0))
        checkpoints.save(2, wait=False)
        expected = client.sample("a", 1000), client.sample("b", 4)
        client.insert("a", items(1_000, 30_000, 51))
        checkpoints.wait_until_written()
        assert written_bytes(tmp_path / "step-00000002") <= 0.05 * open_checkpoint(tmp_path / "step-00000002").size
        checkpoints.restore()
        for one, name in zip(expected, ("a", "b"), strict=True):
            found = client.sample(name, len(one.keys))
            assert fingerprint_of(tuple(found)) == fingerprint_of(tuple(one))
        run.stop()


def test_the_tables_of_another_node_are_refused(tmp_path: Path) -> None:
    program = lp.Program("replay")
    nodes = [
        program.add_node(rl.ReplayNode({name: rl.Table(10)}), label=label) for name, label in (("a", "n1"), ("b", "n2"))
    ]
    with lp.launch(program, "thread", run_dir=tmp_path / "run") as run:
        one, other = (Checkpoints({"replay": rl.ReplayPart(run.client(node))}, tmp_path) for node in nodes)
        one.save(1)
        with pytest.raises(CheckpointError, match=r"tables a.*b"):
            other.restore()
        run.stop()


def written_bytes(checkpoint: Path) -> int:
    """Return the bytes of the files that the checkpoint before does not have."""
    return sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file() and file.stat().st_nlink == 1)
