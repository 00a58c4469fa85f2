"""Killed anywhere, resumed exactly: programs under kill -9 and SIGSTOP at random moments.

    python -m benchmarks.chaos [--rounds 5] [--seed 0] [--programs char_gpt,sync,async] [--modes process,multi_host]

By turns: the demo's char GPT (feeder, three stages, evaluator, trainer; a small model), the same with
--on_failure=restart, the parameter server in "sync" mode (two workers, two servers, evaluator), a training whose feeder
and counter have a state and are not called most of the time (benchmarks/stateful.py), and the parameter server in
"async" mode with parameters that count their updates (benchmarks/tally.py). The first ends when a node dies; the others
restart it in its place, and end when the launcher or its template does. A round starts one with `lp_pipe launch` and
strikes: a random process of the run, the launcher and its template included, is killed, or stopped for some seconds, at
any moment, while a checkpoint is being written, or while something is being restarted. A run that has ended with a
failure is resumed from its newest checkpoint by `lp_pipe launch --resume`, perhaps in another mode, and may be struck,
too. The parameters' sha256 at the end must be the undisturbed run's in every round, and no process may be left; else
the exit status is 1.

"lost" is the time that a round took longer than the undisturbed run, per strike that ended a run: mostly the start of
all processes (a second or more to import torch), and the steps since the last checkpoint.
"""

import argparse
import math
import pathlib
import random
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.report import machine, show_table, spread, write_json
from benchmarks.strikes import MOMENTS, Chance, Program, Round, disturbed, undisturbed

_SMALL_GPT = (
    "--stages=3 --steps=40 --eval_every=4 --microbatches=4 --batch_size=8 --context=32 --width=32 --layers=3 --heads=2 "
    "--sample_length=20"
)
_TWO_AND_TWO = "--num_workers=2 --num_servers=2"
PROGRAMS = {
    "char_gpt": Program("examples/char_gpt.py", tuple(_SMALL_GPT.split())),
    "char_gpt_restarted": Program("examples/char_gpt.py", (*_SMALL_GPT.split(), "--on_failure=restart")),
    "sync": Program("lp_pipe.programs.parameter_server", (*_TWO_AND_TWO.split(), "--steps=1500", "--evaluations=30")),
    "stateful": Program("benchmarks/stateful.py", ("--steps=60",)),
    "async": Program("benchmarks/tally.py", (*_TWO_AND_TWO.split(), "--mode=async", "--steps=500", "--evaluations=30")),
}

_MOMENTS = dict(zip(MOMENTS, ("at any moment", "during a checkpoint's write", "during a restart"), strict=True))


def figures_of(reference: Round, rounds: Sequence[Round]) -> dict[str, Any]:
    lost = [
        (done.seconds - reference.seconds) / ends
        for done in rounds
        if (ends := sum(strike.ended_run for strike in done.strikes))
    ]
    strikes = [strike for done in rounds for strike in done.strikes]
    return {
        "rounds": len(rounds),
        "same_sha256": sum(done.sha256 == reference.sha256 for done in rounds),
        "unstruck": sum(not done.strikes for done in rounds),
        "strikes": {moment: sum(strike.moment == moment for strike in strikes) for moment in MOMENTS},
        "kills": sum(strike.signal == "SIGKILL" for strike in strikes),
        "runs_ended": sum(strike.ended_run for strike in strikes),
        "processes_left": sum(done.left for done in rounds),
        "undisturbed_s": reference.seconds,
        "lost_s": {**spread(lost), "p99": sorted(lost)[math.ceil(0.99 * len(lost)) - 1]} if lost else None,
        "strikes_of_rounds": [[strike._asdict() for strike in done.strikes] for done in rounds],
    }


def show(programs: dict[str, dict[str, Any]]) -> None:
    rows = [
        ["rounds", *[str(one["rounds"]) for one in programs.values()]],
        ["with the undisturbed run's sha256", *[str(one["same_sha256"]) for one in programs.values()]],
        *[
            [f"strikes {text}", *[str(one["strikes"][moment]) for one in programs.values()]]
            for moment, text in _MOMENTS.items()
        ],
        ["rounds that were over before a strike", *[str(one["unstruck"]) for one in programs.values()]],
        ["of the strikes kill -9", *[str(one["kills"]) for one in programs.values()]],
        ["runs that they ended", *[str(one["runs_ended"]) for one in programs.values()]],
        ["processes left", *[str(one["processes_left"]) for one in programs.values()]],
        ["undisturbed run, s", *[f"{one['undisturbed_s']:.1f}" for one in programs.values()]],
        ["lost per ended run, s: median / p99", *[_lost(one["lost_s"]) for one in programs.values()]],
    ]
    show_table("killed anywhere, resumed exactly", ["", *programs], rows)


def _lost(seconds: dict[str, Any] | None) -> str:
    return f"{seconds['median']:.1f} / {seconds['p99']:.1f}" if seconds else "none ended"


def _say(index: int, name: str, done: Round, reference: Round) -> None:
    is_same = "same" if done.sha256 == reference.sha256 else "ANOTHER"
    struck = ", ".join(f"{strike.signal} {strike.victim} ({strike.moment})" for strike in done.strikes)
    sys.stderr.write(f"round {index}, {name}: {done.seconds:.1f} s, {is_same} sha256, {done.left} left; {struck}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of all programs together")
    parser.add_argument("--seed", type=int, default=0, help="decides moments, victims and signals")
    parser.add_argument("--programs", type=lambda text: text.split(","), default=list(PROGRAMS), help="with commas")
    parser.add_argument(
        "--modes",
        type=lambda text: text.split(","),
        default=["process"],
        help="of which each start takes one by chance, with commas: thread, process, multi_host (default: process)",
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lp-chaos-") as folder:
        programs = options.programs[: options.rounds]
        references = {name: undisturbed(PROGRAMS[name], pathlib.Path(folder, name)) for name in programs}
        rounds: dict[str, list[Round]] = {name: [] for name in programs}
        for index in range(options.rounds):
            name = programs[index % len(programs)]
            chance = Chance(random.Random(f"{options.seed}/{index}"), options.modes, references[name].seconds)
            rounds[name].append(disturbed(PROGRAMS[name], pathlib.Path(folder, f"round{index}"), chance))
            _say(index, name, rounds[name][-1], references[name])
    found = {name: figures_of(references[name], rounds[name]) for name in programs}
    show(found)
    write_json({"benchmark": "chaos", "machine": machine(), "seed": options.seed, "programs": found}, options.json)
    is_good = all(one["same_sha256"] == one["rounds"] and not one["processes_left"] for one in found.values())
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
