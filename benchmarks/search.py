"""Measure a search over trials: how long it takes beside its bound, and what a report with a checkpoint costs.

    python -m benchmarks.search [--repeats 3] [--epoch-ms 20] [--json FILE]

64 trials by successive halving in 4 slots: 160 epochs, each a sleep. The bound is 160 epochs divided by 4. "search" is
the time from the first trial's start to the last report; "with launch" is all of it. Optuna and Ray Tune run beside it,
if they are installed: Optuna's successive halving in 4 processes over a journal file, Ray Tune's ASHA with reused
actors. These decide by the reports there are, so that they run other numbers of epochs. The parties take turns.
"""

import argparse
import contextlib
import logging
import multiprocessing
import pathlib
import pickle
import sqlite3
import statistics
import sys
import tempfile
import time
from contextlib import closing
from importlib.util import find_spec
from typing import Any

import lp_pipe as lp
import lp_pipe.search as ls
from benchmarks.report import machine, show_table, spread, write_json

TRIALS, STEPS, SLOTS, EPOCHS = 64, 16, 4, 160


class Counter:
    """The state of a trial, which sleeps instead of training."""

    def __init__(self) -> None:
        self.epochs = 0

    def state_dict(self) -> int:
        return self.epochs

    def load_state_dict(self, epochs: int) -> None:
        self.epochs = epochs


def trial(t: ls.Trial) -> None:
    counter, seconds = Counter(), []
    t.restore(counter)
    for step in t.steps():
        time.sleep(t.params["epoch_s"])
        counter.epochs += 1
        start = time.perf_counter()
        t.report({"loss": abs(t.params["x"] - 0.5) / step}, checkpoint=counter)
        seconds.append(time.perf_counter() - start)
    (t.folder / f"seconds-{t.attempt}").write_bytes(pickle.dumps(seconds))


def lp_pipe_search(folder: pathlib.Path, epoch_s: float) -> dict[str, Any]:
    """Run the search in process mode."""
    program = ls.experiment(
        "bench",
        trial,
        space={"x": ls.uniform(0.0, 1.0), "epoch_s": epoch_s},
        searcher=ls.Halving("loss", TRIALS, STEPS),
        slots=SLOTS,
        folder=folder / "experiment",
    )
    start = time.perf_counter()
    lp.launch(program, "process", run_dir=folder / "run").wait()
    whole = time.perf_counter() - start
    rows = ls.open(folder / "experiment").rows()
    if len(rows) != EPOCHS:
        raise SystemExit(f"{len(rows)} epochs were run, {EPOCHS} were due")
    with closing(sqlite3.connect(folder / "experiment" / "experiment.sqlite")) as db:
        (begin,) = db.execute("SELECT min(time) FROM events WHERE event='attempt'").fetchone()
    seconds = [one for file in folder.glob("experiment/trials/*/seconds-*") for one in pickle.loads(file.read_bytes())]
    return {"search_s": rows[-1].time - begin, "with_launch_s": whole, "epochs": len(rows), "report_s": seconds}


def optuna_worker(journal: str, epoch_s: float, count: int, results: Any) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.load_study(
        study_name="bench",
        storage=_journal(journal),
        sampler=optuna.samplers.RandomSampler(),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=4),
    )
    seconds: list[float] = []
    begin = time.time()

    def objective(one: Any) -> float:
        x = one.suggest_float("x", 0.0, 1.0)
        for step in range(1, STEPS + 1):
            time.sleep(epoch_s)
            start = time.perf_counter()
            one.report(abs(x - 0.5) / step, step)
            is_pruned = one.should_prune()
            seconds.append(time.perf_counter() - start)
            if is_pruned:
                raise optuna.TrialPruned
        return float(abs(x - 0.5) / STEPS)

    study.optimize(objective, n_trials=count)
    results.put((begin, time.time(), seconds))


def _journal(path: str) -> Any:
    import optuna

    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))


def optuna_search(folder: pathlib.Path, epoch_s: float) -> dict[str, Any]:
    """Run as many trials in Optuna, in as many processes; its reports write no checkpoint."""
    import optuna

    start = time.perf_counter()
    journal = str(folder / "journal")
    optuna.create_study(study_name="bench", storage=_journal(journal))
    forks = multiprocessing.get_context("spawn")
    results = forks.Queue()
    arguments = (journal, epoch_s, TRIALS // SLOTS, results)
    workers = [forks.Process(target=optuna_worker, args=arguments) for _ in range(SLOTS)]
    for worker in workers:
        worker.start()
    done = [results.get(timeout=120.0) for _ in workers]
    for worker in workers:
        worker.join()
    whole = time.perf_counter() - start
    seconds = [one for *_, some in done for one in some]
    search = max(end for _, end, _ in done) - min(begin for begin, _, _ in done)
    return {"search_s": search, "with_launch_s": whole, "epochs": len(seconds), "report_s": seconds}


def ray_trial(config: dict[str, Any]) -> None:
    from ray import tune

    seconds: list[float] = []
    for step in range(1, STEPS + 1):
        time.sleep(config["epoch_s"])
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "state").write_bytes(pickle.dumps(step))
            loss = abs(config["x"] - 0.5) / step
            last = seconds[-1] if seconds else 0.0
            tune.report({"loss": loss, "last_s": last}, checkpoint=tune.Checkpoint.from_directory(folder))
        seconds.append(time.perf_counter() - start)


def ray_search(folder: pathlib.Path, epoch_s: float) -> dict[str, Any]:
    """Run as many trials in Ray Tune with ASHA; "with launch" has the start of its own cluster."""
    import ray
    from ray import tune

    start = time.perf_counter()
    ray.init(num_cpus=SLOTS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        begin = time.perf_counter()
        scheduler = tune.schedulers.ASHAScheduler(max_t=STEPS, grace_period=1, reduction_factor=4)
        grid = tune.Tuner(
            ray_trial,
            param_space={"x": tune.uniform(0.0, 1.0), "epoch_s": epoch_s},
            tune_config=tune.TuneConfig(
                metric="loss", mode="min", num_samples=TRIALS, scheduler=scheduler, reuse_actors=True
            ),
            run_config=tune.RunConfig(storage_path=str(folder), name="bench", verbose=0),
        ).fit()
        search = time.perf_counter() - begin
    finally:
        ray.shutdown()
    whole = time.perf_counter() - start
    frames = [grid[number].metrics_dataframe for number in range(len(grid))]
    found = [frame for frame in frames if frame is not None]
    seconds = [float(one) for frame in found for one in frame["last_s"] if one > 0.0]
    return {"search_s": search, "with_launch_s": whole, "epochs": sum(map(len, found)), "report_s": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epoch-ms", type=float, default=20.0)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    parties = {"lp_pipe": lp_pipe_search}
    if find_spec("optuna"):
        parties["Optuna, no checkpoints"] = optuna_search
    if find_spec("ray") and find_spec("pandas"):  # Ray comes without Tune, too
        parties["Ray Tune"] = ray_search
    epoch_s = arguments.epoch_ms / 1000.0
    bound = EPOCHS * epoch_s / SLOTS
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in parties}
    for _ in range(arguments.repeats):
        for name, party in parties.items():
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):  # of nodes
                runs[name].append(party(pathlib.Path(folder), epoch_s))
    figures: dict[str, Any] = {"benchmark": "search", "machine": machine(), "bound_s": bound, "parties": {}}
    rows = []
    for name, found in runs.items():
        seconds = sorted(one for run in found for one in run["report_s"])
        p50, p90 = statistics.median(seconds), seconds[int(len(seconds) * 0.9)]
        search, whole = (spread(run[key] for run in found) for key in ("search_s", "with_launch_s"))
        epochs = [run["epochs"] for run in found]
        own = {"search_s": search, "with_launch_s": whole, "epochs": epochs, "report_p50_s": p50, "report_p90_s": p90}
        figures["parties"][name] = own
        ratio = search["median"] / (statistics.median(epochs) * epoch_s / SLOTS)
        times = (f"{search['median']:.2f}", f"{ratio:.2f}", f"{whole['median']:.2f}")
        rows.append((name, *times, f"{statistics.median(epochs):g}", f"{p50 * 1e3:.2f}", f"{p90 * 1e3:.2f}"))
    title = f"{TRIALS} trials, {SLOTS} slots, epochs of {arguments.epoch_ms:g} ms; the bound is {bound:.2f} s"
    columns = ("", "search s", "x its bound", "with launch s", "epochs", "report p50 ms", "p90 ms")
    show_table(title, columns, rows)
    write_json(figures, arguments.json)


if __name__ == "__main__":
    main()
