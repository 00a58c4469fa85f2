"""Measure what a killed worker costs: one of three data-parallel workers is killed at random moments, beside torchrun.

    python -m benchmarks.killed_workers [--json FILE] [--kills N] [--torch-kills N]

lp_pipe's survivors keep their processes and go on; torchrun ends and starts all, which load a checkpoint of each step.
"next step" is from the kill to the end of the first step among other workers than before, "replaced" to that of the
successor's first one. Both trainings make steps of at least 20 ms, over the same batches.
"""

import argparse
import hashlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp
from benchmarks.report import machine, show_table, spread, write_json

WORKERS, SAMPLES = 3, 12
STEP_S = 0.02
_WIDTH = 256  # three layers of 256 KiB
_PAUSE_S = (0.2, 1.0)  # between the recovery from a kill and the next one
_PATIENCE_S = 60.0
_MOST_STEPS, _STEPS_LEFT = 10**6, 30  # after the last kill


def build() -> nn.Module:
    torch.set_num_threads(1)
    with pp.layer_rng(0, 0):
        return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(3)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs, and the ids of the samples as targets."""
    x = torch.randn(SAMPLES, _WIDTH, generator=torch.Generator().manual_seed(step))
    return x, torch.arange(SAMPLES) + step * SAMPLES


class Diary:
    """What a process notes: a line for each event, each in one write, so that a killed one keeps its lines."""

    def __init__(self, folder: str) -> None:
        self._file = os.open(f"{folder}/{os.getpid()}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(self, event: str, step: int, **facts: Any) -> None:
        line = {"event": event, "step": step, "pid": os.getpid(), "time": time.time(), **facts}
        os.write(self._file, f"{json.dumps(line)}\n".encode())


def last_step(folder: str) -> int | None:
    """Return the number of steps of a training, once the parent has decided."""
    file = pathlib.Path(folder) / "steps"
    return int(file.read_text()) if file.exists() else None


def end_after(folder: str, steps: int) -> None:
    whole = pathlib.Path(folder) / "steps.new"
    whole.write_text(str(steps))
    whole.rename(pathlib.Path(folder) / "steps")


def train(replica: dp.Replica, folder: str) -> None:
    model, diary = build(), Diary(folder)
    optimizer = replica.optimizer(torch.optim.Adam(model.parameters(), 1e-4), model)
    for step in replica.steps(_MOST_STEPS, model=model, optimizer=optimizer):
        if step == last_step(folder):
            break
        generation = replica.generation
        for x, ids, weight in replica.shards(batch(step)):
            (model(x).square().mean() * weight).backward()
            diary.note("shard", step, generation=generation, ids=ids.tolist())
        time.sleep(STEP_S)
        if optimizer.step():
            diary.note("done", step, generation=generation)
    if replica.rank == 0:
        diary.note("end", step, parameters=fingerprint(model))


def torch_main(steps: int, folder: str) -> None:
    """Train as a rank of torchrun: DDP over gloo, and a checkpoint after each step."""
    dist.init_process_group("gloo")
    model, diary = build(), Diary(folder)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    saved, first = pathlib.Path(folder) / "checkpoint.pt", 0
    if saved.exists():
        first, parameters, state = torch.load(saved)
        model.load_state_dict(parameters)
        optimizer.load_state_dict(state)
    parallel = nn.parallel.DistributedDataParallel(model)
    for step in range(first, steps):
        (x, ids), rank = batch(step), dist.get_rank()
        parallel(x.chunk(WORKERS)[rank]).square().mean().backward()
        time.sleep(STEP_S)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            torch.save((step + 1, model.state_dict(), optimizer.state_dict()), f"{saved}.new")
            os.replace(f"{saved}.new", saved)
        diary.note(
            "done", step, generation=os.environ["TORCHELASTIC_RESTART_COUNT"], ids=ids.chunk(WORKERS)[rank].tolist()
        )
    dist.destroy_process_group()


def fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def lines(folder: str) -> Iterator[dict[str, Any]]:
    """Yield what all processes have noted so far."""
    for file in pathlib.Path(folder).glob("*.jsonl"):
        for line in file.read_text().splitlines():
            yield json.loads(line)


def kill_workers(folder: str, pids: Callable[[], list[int]], kills: int, is_over: Callable[[], bool]) -> dict[str, Any]:
    """Kill one worker after the other; return the seconds until the others, and its successor, have finished a step."""
    rng = random.Random(1)
    found: dict[str, Any] = {"next_step_s": [], "replaced_s": [], "same_pids": [], "never": 0}
    for _ in range(kills):
        time.sleep(rng.uniform(*_PAUSE_S))
        before = pids()
        if is_over() or len(before) < WORKERS:
            break
        victim = rng.choice(before)
        generations = {str(line["generation"]) for line in lines(folder) if line["event"] == "done"}
        os.kill(victim, signal.SIGKILL)
        at = time.time()
        next_step = replaced = 0.0
        while not (next_step and replaced) and time.time() - at < _PATIENCE_S and not is_over():
            time.sleep(0.02)
            done = [line for line in lines(folder) if line["event"] == "done" and line["time"] > at]
            new = [line for line in done if str(line["generation"]) not in generations]
            next_step = min((line["time"] for line in new), default=0.0)
            replaced = min((line["time"] for line in new if line["pid"] not in before), default=0.0)
        if not next_step:
            found["never"] += 1
            break
        found["next_step_s"].append(next_step - at)
        if replaced:
            found["replaced_s"].append(replaced - at)
            found["same_pids"].append(len(set(before) & set(pids())))
    return found


def with_lp_pipe(kills: int, steps: int | None = None) -> dict[str, Any]:
    """Train for so many steps, or until all kills are done."""
    with tempfile.TemporaryDirectory() as folder:
        program = lp.Program("killed")
        options: dict[str, Any] = {"on_failure": "restart", "max_restarts": 10 * max(1, kills)}
        dp.add_replicas(program, train, folder, replicas=WORKERS, **options)
        if steps is not None:
            end_after(folder, steps)
        run = lp.launch(program, mode="process", run_dir=pathlib.Path(folder) / "run")
        try:
            while kills and finished_steps(folder) < 2:
                time.sleep(0.02)
            found = kill_workers(folder, partial(_pids, run), kills, lambda: False)
            if steps is None:
                steps = finished_steps(folder) + _STEPS_LEFT
                end_after(folder, steps)
            run.wait(600)
        finally:
            run.stop()
        noted = list(lines(folder))
    found["steps"] = steps
    found["parameters"] = next(line["parameters"] for line in noted if line["event"] == "end")
    found["steps_lost"], found["samples_wrong"] = lost(noted, steps)
    return found


def finished_steps(folder: str) -> int:
    return 1 + max((line["step"] for line in lines(folder) if line["event"] == "done"), default=-1)


def lost(noted: list[dict[str, Any]], steps: int) -> tuple[int, int]:
    """Return how many steps no worker has finished, or in two attempts; and how many samples were not there once."""
    attempts: dict[int, set[int]] = defaultdict(set)
    shards: dict[tuple[int, int], list[int]] = defaultdict(list)
    for line in noted:
        if line["event"] == "done":
            attempts[line["step"]].add(line["generation"])
        elif line["event"] == "shard":
            shards[line["step"], line["generation"]] += line["ids"]
    steps_lost = sum(len(attempts[step]) != 1 for step in range(steps))
    samples_wrong = 0
    for step in range(steps):
        ids = [one for generation in attempts[step] for one in shards[step, generation]]
        expected = range(step * SAMPLES, (step + 1) * SAMPLES)
        samples_wrong += sum(ids.count(one) != 1 for one in expected)
    return steps_lost, samples_wrong


def with_torchrun(kills: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--standalone", f"--nproc-per-node={WORKERS}", f"--max-restarts={kills + 1}"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "benchmarks.killed_workers"]
        with open(f"{folder}/log", "wb") as log:
            agent = subprocess.Popen([*command, f"--torch-folder={folder}"], stdout=log, stderr=log)
        try:
            while finished_steps(folder) < 2 and agent.poll() is None:
                time.sleep(0.05)
            found = kill_workers(folder, partial(_writing, folder), kills, lambda: agent.poll() is not None)
            found["agent_exit_status"] = agent.poll()
        finally:
            agent.terminate()
            agent.wait(30)
        repeated: dict[tuple[int, int], int] = defaultdict(int)
        for line in lines(folder):
            for one in line["ids"]:
                repeated[line["step"], one] += 1
    found["samples_wrong"] = sum(count != 1 for count in repeated.values())
    return found


def _pids(run: lp.Run) -> list[int]:
    return [row["pid"] for row in run.status()["replicas"] if row["pid"] and row["state"] == "running"]


def _writing(folder: str) -> list[int]:
    """Return the processes that have noted something and are alive."""
    noted = [int(file.stem) for file in pathlib.Path(folder).glob("*.jsonl")]
    return [pid for pid in noted if _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--torch-kills", type=int, default=5)
    parser.add_argument("--torch-folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch_folder:
        torch_main(10**6, options.torch_folder)
        return
    load = os.getloadavg()[0]
    killed = with_lp_pipe(options.kills)
    undisturbed = with_lp_pipe(0, killed["steps"])
    beside = with_torchrun(options.torch_kills)
    rows = []
    for name, found in {"lp_pipe": killed, "torchrun": beside}.items():
        for key in ("next_step_s", "replaced_s"):
            found[key] = spread(found[key]) if found[key] else None
        shown = [
            f"{found[key]['median']:.2f} ({found[key]['min']:.2f}–{found[key]['max']:.2f})" if found[key] else "never"
            for key in ("next_step_s", "replaced_s")
        ]
        kept = f"{min(found['same_pids'], default=0)} of {WORKERS - 1}"
        kills = len(found["next_step_s"]["values"]) if found["next_step_s"] else 0
        rows.append([name, str(kills), *shown, kept, str(found.get("steps_lost", "-")), str(found["samples_wrong"])])
    columns = ["", "kills", "next step s", "replaced s", "survivors kept", "steps lost", "samples not once"]
    show_table(f"kill -9 of one of {WORKERS} workers", columns, rows)
    is_equal = killed["parameters"] == undisturbed["parameters"]
    print(f"parameters equal to the undisturbed run's: {is_equal}")
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores")
    figures = {"lp_pipe": killed, "torchrun": beside, "is_equal": is_equal}
    write_json({"benchmark": "killed_workers", "machine": machine(), "figures": figures}, options.json)


if __name__ == "__main__":
    main()
