"""The output of benchmarks: a table, or one JSON object."""

import json
import os
import pathlib
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

_WIDTH = 140  # where stdout is no terminal


def spread(values: Iterable[float]) -> dict[str, Any]:
    """Median, smallest and largest, and the values themselves."""
    kept = list(values)
    return {"median": statistics.median(kept), "min": min(kept), "max": max(kept), "values": kept}


def machine() -> dict[str, Any]:
    """Return the machine and versions that belong to the figures."""
    return {
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """The first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def write_json(figures: dict[str, Any], path: pathlib.Path | None) -> None:
    """Write one line: to the file, or to stdout after the tables."""
    text = json.dumps(figures) + "\n"
    if path is None:
        sys.stdout.write(text)
    else:
        path.write_text(text)
