"""Makes the table for the order of an experiment, and brings it into checkpoints and back."""

import pickle
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lp_pipe.rl.experiment import Rounds
from lp_pipe.rl.replay.snapshot import Snapshots, read_snapshots
from lp_pipe.rl.rounds.experiment_table import ExperimentOptions, ExperimentTable
from lp_pipe.rl.rounds.free_table import FreeTable
from lp_pipe.rl.rounds.rounds_table import RoundsTable


def make_table(options: ExperimentOptions) -> ExperimentTable:
    """Return the table for the order of an experiment."""
    return RoundsTable(options) if isinstance(options.order, Rounds) else FreeTable(options)


def read_table(path: Path) -> ExperimentTable | None:
    """Return the table in a folder of a checkpoint; None: there was no table yet."""
    own, _ = read_snapshots(path)
    if own is None:
        return None
    table = make_table(own["options"])
    table.load(path)
    return table


class SavedTable:
    """A table as a part of checkpoints, which it writes itself. state: None before there is one.

    table: None if only the state is wanted.
    """

    def __init__(self, table: ExperimentTable | None = None) -> None:
        self._table = table
        self._snapshots = Snapshots()
        self.state: Any = None

    def save_async(self, path: Path) -> "Future[dict[str, str]]":
        """Take the state of this moment; write it in a thread."""
        assert self._table is not None
        own = pickle.loads(pickle.dumps(self._table.own_state(), protocol=5))  # the loops of this process change it
        self._snapshots.take(own, [self._table.table])
        return self._snapshots.write_in_thread(path)

    def load(self, path: Path) -> None:
        """Continue from the state in a folder; if there is no table, keep the state."""
        if self._table is not None:
            self._table.load(path)
        elif (table := read_table(path)) is not None:
            self.state = table.state_dict()
