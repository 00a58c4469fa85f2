"""`lp_pipe plot`: draw the metrics of a run, or the trials of an experiment."""

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lp_pipe import search
from lp_pipe.cli.errors import DONE, NotLaunched, UsageError, nearest
from lp_pipe.cli.find_run import FOLDER, find_run
from lp_pipe.cli.output_files import output_path, write_file
from lp_pipe.errors import LpPipeError
from lp_pipe.graph.curves import Chart, Curve, charts_to_png, charts_to_svg, charts_to_text
from lp_pipe.search.store import ExperimentFolder
from lp_pipe.telemetry.run_folder import RunFolder

_ENDINGS = (".svg", ".png")
EPILOG = """\
examples:
  lp_pipe plot runs/train-…                         all metrics, in the terminal
  lp_pipe plot runs/train-… loss lr --log           two of them, on a logarithmic axis
  lp_pipe plot runs/train-… loss -o curves.svg      a picture; .png needs matplotlib
  lp_pipe plot experiments/sweep -o curves.svg      the learning curves of an experiment's trials
"""

HELP = "draw the metrics of a run, or the trials of an experiment"
DESCRIPTION = "Draw what the nodes of a run have logged, a chart for each metric and a curve for each node."
USAGE = "lp_pipe plot RUN [NAME…] [-o FILE.svg|.png]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "target",
        metavar="RUN",
        help="the folder, or the beginning of the name, of a run; or the folder of an experiment",
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="metrics to draw (default: all)")
    parser.add_argument(
        "-o",
        "--output",
        type=partial(output_path, suffixes=_ENDINGS),
        metavar="FILE",
        help="ends in .svg or .png (default: text in the terminal)",
    )
    parser.add_argument("--log", action="store_true", help="a logarithmic axis for values")


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Draw the curves.

    Raises:
        UsageError: there is no such run or experiment, or it has no metric of that name.
        NotLaunched: matplotlib is needed for this file.
    """
    folder = Path(arguments.target)
    if ExperimentFolder(folder).database.exists():
        charts = charts_of_experiment(folder)
    else:
        folder = _run_folder(arguments.target)
        charts = charts_of_run(folder)
    chosen = _chosen(charts, arguments.names, folder)
    draw(folder.resolve().name, chosen, arguments.output, arguments.log)
    return DONE


def draw(title: str, charts: Sequence[Chart], output: Path | None, is_log: bool = False) -> None:
    """Print charts, or write them to a file that ends in .svg or .png.

    Raises:
        NotLaunched: the file cannot be written, or matplotlib is needed for it.
    """
    if output is None:
        width = min(120, shutil.get_terminal_size((80, 24)).columns)
        for line in charts_to_text(charts, width=width, is_log=is_log, is_colored=sys.stdout.isatty()):
            print(line)
        return
    if output.suffix == ".svg":
        subtitle = ", ".join(chart.title for chart in charts[:5]) + (", …" if len(charts) > 5 else "")
        write_file(output, charts_to_svg(title, subtitle, charts, is_log=is_log))
    else:
        try:
            charts_to_png(str(output), title, charts, is_log=is_log)
        except ImportError as error:
            raise NotLaunched(f"-o {output}: {error}") from None
        except OSError as error:
            raise NotLaunched(f"-o {output}: cannot be written: {error.strerror}") from None
    print(f"wrote {output}")


def charts_of_run(folder: Path) -> list[Chart]:
    """Return a chart for each metric, in the order in which they were first logged, with a curve for each node.

    Where a node went back to a checkpoint, its steps after that are those of the second time.
    """
    series: dict[str, dict[str, dict[float, float]]] = {}
    for line in _lines(RunFolder(folder).metrics):
        node, step = str(line.get("node")), line.get("step")
        if line.get("event") == "resumed":
            for by_node in series.values():
                points = by_node.get(node, {})
                for later in [one for one in points if one >= line["step"]]:
                    del points[later]
        for name, value in line.get("values", {}).items():
            points = series.setdefault(name, {}).setdefault(node, {})
            points[float(len(points)) if step is None else float(step)] = float(value)
    return [
        Chart(name, [Curve(node, sorted(points.items())) for node, points in by_node.items()])
        for name, by_node in series.items()
    ]


def charts_of_experiment(folder: Path) -> list[Chart]:
    """Return one chart, of the metric that the search looks at, with a curve for each trial.

    Raises:
        UsageError: the experiment cannot be read.
    """
    try:
        found = search.open(folder)
        curves = [Curve(f"trial {trial}", points) for trial, points in sorted(found.curves().items())]
    except (OSError, LpPipeError) as error:
        raise UsageError(f"cannot read the experiment in {folder}: {error}") from error
    return [Chart(found.searcher.metric or "metric", curves)]


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for text in file:
                try:
                    yield json.loads(text)
                except ValueError:  # the last line of a run that writes at this moment
                    continue
    except OSError:
        return


def _run_folder(text: str) -> Path:
    if RunFolder(Path(text)).metrics.exists():
        return Path(text)
    if not Path(text).is_dir() and RunFolder(FOLDER / text).metrics.exists():  # an ended run, by its name
        return FOLDER / text
    return Path(find_run(text).run_dir)


def _chosen(charts: Sequence[Chart], names: Sequence[str], folder: Path) -> list[Chart]:
    known = {chart.title: chart for chart in charts}
    if not any(curve.points for chart in charts for curve in chart.curves):
        raise UsageError(f"{folder}: no metrics have been logged there")
    for name in names:
        if name not in known:
            raise UsageError(f"{folder} has no metric {name!r}{nearest(name, known)} (metrics: {', '.join(known)})")
    return [known[name] for name in names] or list(charts)
