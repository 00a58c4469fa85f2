"""Training with a failure every minute for an hour: does anything grow?

    python -m benchmarks.endurance [--seconds 3600] [--every 60] [--csv FILE] [--svg FILE] [--json FILE]

A small char GPT (three stages, feeder, trainer) is trained with a checkpoint every 20 steps. Every so often one of the
stages or the feeder, by turns, is killed, and starts again in its place; launcher, template and trainer live through
all of it. Every few seconds their memory, threads and file descriptors are written down, those of all processes
together, shared memory, and what the run and its temporary files take on the disk.

At the end the parameters must be those of a training of as many steps without failures, and nothing may have grown:
the median of the last quarter is compared with the one of the second quarter. Else the exit status is 1.
"""

import argparse
import contextlib
import csv
import functools
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import lp_pipe as lp
import lp_pipe.pipeline as pp
from benchmarks.consumption import bytes_in, files_in, held, shared_mib
from benchmarks.curves import svg
from benchmarks.report import machine, show_table, write_json
from examples import char_gpt
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.process_tree import tree_of

_CONFIG = char_gpt.Config(stages=3, microbatches=4, batch_size=8, context=32, width=32, layers=3, heads=2, steps=1000)
_MANY = 1 << 30
_PAUSE_S = 0.02  # after each step, so that the machine has time for others in this hour
_SAVE_EVERY = 20
# The share by which a figure may be larger at the end, and what is nothing in its unit.
_TOLERANCE = {"mib": (0.05, 4.0), "threads": (0.0, 2), "descriptors": (0.0, 4), "files": (0.0, 10)}

Row = dict[str, float]


def train(pipeline: pp.PipelineClient, folder: pathlib.Path, steps: int, pause_s: float) -> None:
    """Train until `steps` are done or the file `enough` exists; then write the fingerprint to a file."""
    checkpoints = Checkpoints({"pipeline": pipeline})
    for result in checkpoints.steps(pipeline, steps, save_every=_SAVE_EVERY):
        (folder / "step").write_text(str(result.step))
        if (folder / "enough").exists() or lp.wait_for_stop(pause_s):
            break
    checkpoints.wait_until_written()
    (folder / "result").write_text(f"{pipeline.current_step()} {pipeline.fingerprint()}")
    lp.stop()


def program(folder: pathlib.Path, steps: int, pause_s: float) -> lp.Program:
    model = pp.Model(
        [pp.Layer(factory, name=name) for name, factory in char_gpt.layer_factories(_CONFIG)],
        loss=char_gpt.loss,
        optimizer=functools.partial(char_gpt.optimizer, learning_rate=1e-4),
        seed=_CONFIG.seed,
    )
    made = lp.Program("endurance")
    with made.group("feeder", on_failure="restart", max_restarts=_MANY):
        feeder = made.add_node(
            lp.CourierNode(char_gpt.Feeder, _CONFIG.batch_size, _CONFIG.context, _CONFIG.seed, str(_corpus()))
        )
    options: dict[str, Any] = {"on_failure": "restart", "max_restarts": _MANY}
    counts = {"stages": _CONFIG.stages, "microbatches": _CONFIG.microbatches}
    pipeline = pp.add_pipeline(made, model, **counts, inputs=feeder, **options)
    made.add_node(lp.PyNode(train, pipeline, folder, steps, pause_s), label="trainer")
    return made


def _corpus() -> pathlib.Path:
    """A folder of the standard library's: reading all of it would be half of a feeder's restart."""
    return pathlib.Path(os.__file__).parent / "asyncio"


class Failures(threading.Thread):
    """Kills a stage or the feeder every so often."""

    def __init__(self, run: lp.Run, every_s: float) -> None:
        super().__init__(name="failures")
        self._run, self._every_s = run, every_s
        self._enough = threading.Event()
        self.count = 0

    def run(self) -> None:
        victims = [*(("stages", index) for index in range(_CONFIG.stages)), ("feeder", 0)]
        while not self._enough.wait(self._every_s):
            label, index = victims[self.count % len(victims)]
            row = self._run.status()[label][index]
            if row["state"] == "running":
                os.kill(row["pid"], signal.SIGKILL)
                self.count += 1

    def end(self) -> None:
        self._enough.set()
        self.join()


def sample(run: lp.Run, folder: pathlib.Path) -> Row:
    pids = tree_of(os.getpid())
    (trainer,) = (row["pid"] for row in run.status()["trainer"])
    survivors = {"launcher": held(os.getpid()), "template": held(_template(pids)), "trainer": held(trainer)}
    everybody = [held(pid) for pid in (os.getpid(), *pids)]
    step = folder / "step"
    return {
        "step": float(step.read_text() or 0) if step.exists() else 0.0,
        **{f"{name}_mib": one.rss_mib for name, one in survivors.items()},
        "all_mib": sum(one.rss_mib for one in everybody),
        **{f"{name}_threads": one.threads for name, one in survivors.items()},
        "all_threads": sum(one.threads for one in everybody),
        **{f"{name}_descriptors": one.descriptors for name, one in survivors.items()},
        "all_descriptors": sum(one.descriptors for one in everybody),
        "shared_mib": shared_mib([os.getpid(), *pids]),
        "disk_mib": bytes_in(folder) / (1 << 20),
        "disk_files": files_in(folder),
    }


def _template(pids: list[int]) -> int:
    names = {pid: pathlib.Path(f"/proc/{pid}/comm") for pid in pids}
    return next((pid for pid, name in names.items() if name.exists() and "template" in name.read_text()), 0)


def measured(
    folder: pathlib.Path, seconds: float, every_s: float, write: Callable[[Row], object]
) -> tuple[list[Row], int]:
    """Run the program with failures; return the recorded figures and the number of killed nodes."""
    rows: list[Row] = []
    start = time.monotonic()
    with lp.launch(program(folder, _MANY, _PAUSE_S), "process", run_dir=folder / "run") as run:
        failures = Failures(run, every_s)
        failures.start()
        try:
            while (now := time.monotonic() - start) < seconds and run.failure is None:
                rows.append({"seconds": now, "failures": failures.count, **sample(run, folder)})
                write(rows[-1])
                time.sleep(min(5.0, seconds / 100))
        finally:
            failures.end()
        (folder / "enough").touch()
        run.wait(120)
    return rows, failures.count


@contextlib.contextmanager
def writing(path: pathlib.Path | None) -> Iterator[Callable[[Row], object]]:
    """Rows go to the file as they come: an hour is long, and may end early."""
    if path is None:
        yield lambda row: None
        return
    with path.open("w", newline="") as file:
        writer = csv.writer(file)

        def write(row: Row) -> None:
            if not file.tell():
                writer.writerow(row)
            writer.writerow([round(value, 2) for value in row.values()])
            file.flush()

        yield write


def growth(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Return, for each figure, the medians of the second and the last quarter, and whether it has grown."""
    quarter = len(rows) // 4
    found = {}
    for name in rows[0].keys() - {"seconds", "failures", "step"}:
        early, late = (
            statistics.median(row[name] for row in part) for part in (rows[quarter : 2 * quarter], rows[-quarter:])
        )
        share, nothing = _TOLERANCE[name.rpartition("_")[2]]
        found[name] = {"second_quarter": early, "last_quarter": late, "grows": late > early * (1 + share) + nothing}
    return found


def figure(rows: list[Row], title: str) -> str:
    def curves(unit: str, *names: str) -> dict[str, list[float]]:
        return {name: [row[f"{name}_{unit}"] for row in rows] for name in names}

    everybody = ("launcher", "template", "trainer")
    panels = {
        "memory, MiB": curves("mib", *everybody),
        "memory of all processes, MiB": curves("mib", "all"),
        "threads": curves("threads", *everybody, "all"),
        "file descriptors": curves("descriptors", *everybody, "all"),
        "shared memory and disk, MiB": curves("mib", "shared", "disk"),
        "failures": {"killed": [row["failures"] for row in rows]},
    }
    return svg(title, [row["seconds"] / 60 for row in rows], panels)


def undisturbed(folder: pathlib.Path, steps: int) -> str:
    """The word about a training of so many steps without failures; as threads, which gives the same bits."""
    folder.mkdir()
    lp.launch(program(folder, steps, 0.0), "thread", run_dir=folder / "run").wait()
    return (folder / "result").read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two failures")
    parser.add_argument("--csv", type=pathlib.Path, help="write all rows to this file")
    parser.add_argument("--svg", type=pathlib.Path, help="draw them into this file")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lp-end-") as name:
        folder = pathlib.Path(name)
        (folder / "tmp").mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "tmp")  # what is forgotten there is counted
        with writing(options.csv) as write:
            rows, failures = measured(folder, options.seconds, options.every, write)
        result = (folder / "result").read_text()
        steps = int(result.split()[0])
        is_same = undisturbed(folder / "undisturbed", steps) == result
    found = growth(rows)
    title = f"{failures} failures in {rows[-1]['seconds'] / 60:.0f} minutes, {steps:,} steps"
    lines = [
        [name, f"{one['second_quarter']:.1f}", f"{one['last_quarter']:.1f}", "GROWS" if one["grows"] else "flat"]
        for name, one in sorted(found.items())
    ]
    show_table(title, ["", "second quarter", "last quarter", ""], lines)
    sys.stdout.write(f"parameters: {'those' if is_same else 'NOT THOSE'} of {steps} steps without failures\n")
    if options.svg is not None:
        options.svg.write_text(figure(rows, title))
    figures = {"seconds": rows[-1]["seconds"], "failures": failures, "steps": steps, "is_same": is_same}
    write_json({"benchmark": "endurance", "machine": machine(), **figures, "growth": found}, options.json)
    return 0 if is_same and not any(one["grows"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
